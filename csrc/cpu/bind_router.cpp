// The router: float32 scores of every expert from the gate as it is stored, then the choice.
#include <omp.h>

#include <stdexcept>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr int64_t kTokenBlock = 64;
constexpr int64_t kRows = 8;  // of a gate that are expanded together

// A gate whose rows are plain numbers is read where it lies.
bool plain(const Weight& w) {
    const bool numbers = w.element == Element::f32 || w.element == Element::bf16 || w.element == Element::f16;
    const int64_t bytes = w.element == Element::f32 ? 4 : 2;
    return numbers && w.granularity == Granularity::none && w.row_bytes == w.columns * bytes &&
           w.global_scale == 1.0f;
}

Plain plain_type(Element element) {
    return element == Element::f32 ? Plain::f32 : element == Element::bf16 ? Plain::bf16 : Plain::f16;
}

void route(const Kernels& level, const Weight& gate, const Floats& bias, const RouterSizes& sizes,
           const float* x, int64_t tokens, int64_t* ids, float* weights, int threads) {
    const SmallOps& ops = small_ops(level);
    const int64_t experts = sizes.experts, n = gate.columns;
    const bool direct = plain(gate);
    const int64_t blocks = (tokens + kTokenBlock - 1) / kTokenBlock, groups = (experts + kRows - 1) / kRows;
    const int team = team_for(threads, tokens * experts * n, blocks * groups);
    const int64_t mine = lines(direct ? 0 : kRows * n) + lines(2 * experts);
    float* memory = call_memory().floats(lines(tokens * experts) + lines(experts) + team * mine);
    float *products = memory, *of_bias = products + lines(tokens * experts),
          *spare = of_bias + lines(experts);
    ops.widen(bias.data, bias.type, experts, of_bias);
#pragma omp parallel num_threads(team) if (team > 1)
    {
        float* own = spare + omp_get_thread_num() * mine;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * groups; ++i) {
            const int64_t first = i % groups * kRows, count = std::min(kRows, experts - first);
            const int64_t token = i / groups * kTokenBlock, some = std::min(kTokenBlock, tokens - token);
            Floats rows = {gate.codes + first * gate.row_bytes, plain_type(gate.element)};
            if (!direct) {
                for (int64_t r = 0; r < count; ++r) level.dequantize(gate, first + r, own + r * n);
                rows = {reinterpret_cast<const uint8_t*>(own), Plain::f32};
            }
            ops.products(rows, count, n, x + token * n, some, products + token * experts + first, experts);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            ops.choose(products + t * experts, of_bias, sizes, own, ids + t * sizes.top_k,
                       weights + t * sizes.top_k);
        }
    }
}

}  // namespace

void bind_router(nb::module_& m) {
    m.def("route", [](const LevelHandle& l, const Weight& gate, uintptr_t bias, int bias_type, int64_t top_k,
                      int64_t groups, int64_t topk_groups, bool normalize, float scaling, uintptr_t x,
                      int64_t tokens, uintptr_t ids, uintptr_t weights, int threads) {
        const RouterSizes sizes = {gate.rows, top_k, groups, topk_groups, normalize, scaling};
        const bool grouped = topk_groups < groups;
        if (top_k < 1 || top_k > gate.rows || (grouped && (groups > kMaxGroups || gate.rows / groups < 2))) {
            throw std::invalid_argument("the router's sizes do not fit its experts");
        }
        nb::gil_scoped_release release;
        route(*l.kernels, gate, floats_at(bias, bias_type), sizes, at<const float>(x), tokens,
              at<int64_t>(ids), at<float>(weights), threads);
    });
}
