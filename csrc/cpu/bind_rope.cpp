// Rotary embedding of a part of every head. Angles are float32 products of position and frequency, as
// defined; their sine and cosine are computed once a token and serve all of its heads.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <cmath>
#include <cstring>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

// x [tokens, heads, width] with strides in elements; out contiguous. Elements [start, start + size) turn.
struct Rotation {
    Floats x;
    int64_t tokens, heads, width, token_stride, head_stride, start, size;
    const int64_t* positions;
    const float* frequencies;  // [size / 2]
    bool interleave;
    uint8_t* out;
};

// x and its type, heads, width, strides from token to token and from head to head, start, size, frequencies,
// interleave, out.
using Part = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uintptr_t, bool,
                        uintptr_t>;

void rotate(const SmallOps& ops, const Rotation& r, int threads) {
    const int64_t bytes = plain_bytes(r.x.type), half = r.size / 2, mine = 2 * lines(half) + lines(r.size);
    const int team = team_for(threads, r.tokens * (r.heads * r.width + 8 * r.size), r.tokens);
    float* memory = call_memory().floats(team * mine);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t t = 0; t < r.tokens; ++t) {
        float* cos = memory + omp_get_thread_num() * mine;
        float* sin = cos + lines(half);
        float* part = sin + lines(half);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(r.positions[t]) * r.frequencies[i];
            cos[i] = std::cos(angle);
            sin[i] = std::sin(angle);
        }
        for (int64_t h = 0; h < r.heads; ++h) {
            const uint8_t* from = r.x.from(t * r.token_stride + h * r.head_stride);
            uint8_t* to = r.out + (t * r.heads + h) * r.width * bytes;
            std::memcpy(to, from, static_cast<size_t>(r.width * bytes));
            ops.widen(from + r.start * bytes, r.x.type, r.size, part);
            ops.rotate(part, cos, sin, r.size, r.interleave);
            ops.narrow(part, r.x.type, r.size, to + r.start * bytes);
        }
    }
}

}  // namespace

void bind_rope(nb::module_& m) {
    m.def("rotate", [](const LevelHandle& l, const std::vector<Part>& parts, int64_t tokens,
                       uintptr_t positions, int threads) {
        nb::gil_scoped_release release;
        for (const auto& [x, type, heads, width, token_stride, head_stride, start, size, frequencies,
                          interleave, out] : parts) {
            rotate(small_ops(*l.kernels),
                   {floats_at(x, type), tokens, heads, width, token_stride, head_stride, start, size,
                    at<const int64_t>(positions), at<const float>(frequencies), interleave, at<uint8_t>(out)},
                   threads);
        }
    });
}
