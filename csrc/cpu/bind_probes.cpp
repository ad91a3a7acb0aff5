// Bindings of the probes: `hadron bench` times them from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "probes.h"

namespace nb = nanobind;
using namespace hadron;

void bind_probes(nb::module_& m) {
    m.def("probe_read", [](uintptr_t data, int64_t bytes, int threads) {
        nb::gil_scoped_release release;
        return probe_read(reinterpret_cast<const uint8_t*>(data), bytes, threads);
    });
    m.def("probe_update", [](uintptr_t data, int64_t bytes, int threads) {
        nb::gil_scoped_release release;
        probe_update(reinterpret_cast<uint8_t*>(data), bytes, threads);
    });
    m.def("probe_peak_operations", &probe_peak_operations, nb::arg("level"), nb::arg("kind"));
    m.def("probe_peak", [](const std::string& level, const std::string& kind, int64_t rounds, int threads) {
        nb::gil_scoped_release release;
        return probe_peak(level, kind, rounds, threads);
    });
}
