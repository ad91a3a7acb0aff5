// Rows of an embedding table as float32.
#include <omp.h>

#include <stdexcept>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

void bind_embedding(nb::module_& m) {
    m.def("embedding", [](const LevelHandle& l, uintptr_t table, int type, int64_t vocabulary, int64_t hidden,
                          uintptr_t ids, int64_t tokens, uintptr_t out, int threads) {
        const auto* rows = at<const int64_t>(ids);
        for (int64_t t = 0; t < tokens; ++t) {
            if (rows[t] < 0 || rows[t] >= vocabulary) throw std::out_of_range("a token id is out of range");
        }
        nb::gil_scoped_release release;
        const SmallOps& ops = small_ops(*l.kernels);
        const Floats values = floats_at(table, type);
        const int team = team_for(threads, tokens * hidden, tokens);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
        for (int64_t t = 0; t < tokens; ++t) {
            ops.widen(values.from(rows[t] * hidden), values.type, hidden, at<float>(out) + t * hidden);
        }
    });
}
