// Norms, row by row.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

// Rows of activations, `stride` bytes apart.
struct Rows {
    Floats first;
    int64_t stride;
    const uint8_t* row(int64_t i) const { return first.data + i * stride; }
};

// x, its type and bytes between rows; gate, weight, bias, each with its type (0: none); rows, size, eps, out
// and type. With a bias it is a layer norm, which has a weight and no gate; without, an RMS norm.
using Norm = std::tuple<uintptr_t, int, int64_t, uintptr_t, int, uintptr_t, int, uintptr_t, int, int64_t,
                        int64_t, float, uintptr_t, int>;

template <class F>
void each_row(const SmallOps& ops, const Rows& x, int64_t rows, int64_t size, uint8_t* out, Plain out_type,
              int threads, F norm) {
    const int team = team_for(threads, rows * size, rows);
    const int64_t mine = 2 * lines(size);
    float* memory = call_memory().floats(team * mine);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; ++r) {
        float* row = memory + omp_get_thread_num() * mine;
        ops.widen(x.row(r), x.first.type, size, row);
        norm(r, row, row + lines(size));
        ops.narrow(row, out_type, size, out + r * size * plain_bytes(out_type));
    }
}

}  // namespace

void bind_norm(nb::module_& m) {
    m.def("norms", [](const LevelHandle& l, const std::vector<Norm>& norms, int threads) {
        nb::gil_scoped_release release;
        const SmallOps& ops = small_ops(*l.kernels);
        for (const auto& [x, x_type, x_stride, gate, gate_type, weight, weight_type, bias, bias_type, rows,
                          size, eps, out, out_type] : norms) {
            const Floats gates = floats_at(gate, gate_type), weights = floats_at(weight, weight_type),
                         biases = floats_at(bias, bias_type);
            each_row(ops, {floats_at(x, x_type), x_stride}, rows, size, at<uint8_t>(out),
                     static_cast<Plain>(out_type), threads,
                     [&, size = size, eps = eps](int64_t r, float* row, float* spare) {
                         if (biases.data != nullptr) return ops.layer_norm(row, weights, biases, size, eps);
                         if (gates.data != nullptr) ops.widen(gates.from(r * size), gates.type, size, spare);
                         ops.rms_norm(row, weights.data != nullptr ? &weights : nullptr,
                                      gates.data != nullptr ? spare : nullptr, size, eps);
                     });
        }
    });
}
