// Sites of hyper-connections: mixes and collapse in one call before a block, spread in one after it.
#include <omp.h>

#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr int64_t kTokenBlock = 16;
constexpr int64_t kColumns = 1024;  // of the smallest share of a collapse or spread

struct Site {
    HyperSizes sizes;
    Floats fn, base, scale;
};

// The norm of what a site collapses, and where its rows [tokens, hidden] go.
struct Normed {
    Floats weight;
    float eps;
    uint8_t* out;
    Plain type;
};

// pre, post [tokens, m], comb [tokens, m, m]; collapsed [tokens, hidden] or null, and then not normed.
void enter(const SmallOps& ops, const Site& site, const float* streams, int64_t tokens, float* pre,
           float* post, float* comb, float* collapsed, const Normed& normed, int threads) {
    const HyperSizes& sizes = site.sizes;
    const int64_t m = sizes.streams, n = m * sizes.hidden, rows = (2 + m) * m;
    const int team = team_for(threads, tokens * rows * n, std::max(tokens, rows / 4));
    float* products = call_memory().floats(tokens * rows + rows + 3);
    float *base = products + tokens * rows, *scale = base + rows;
    ops.widen(site.base.data, site.base.type, rows, base);
    ops.widen(site.scale.data, site.scale.type, 3, scale);
    const int64_t chunks = (sizes.hidden + kColumns - 1) / kColumns;
#pragma omp parallel num_threads(team) if (team > 1)
    {
        const int64_t threads_here = omp_get_num_threads(), me = omp_get_thread_num();
        if (tokens >= kTokenBlock * threads_here) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tokens; t += kTokenBlock) {
                ops.products(site.fn, rows, n, streams + t * n, std::min(kTokenBlock, tokens - t),
                             products + t * rows, rows);
            }
        } else {
            const int64_t groups = (rows + 3) / 4;
            const int64_t first = std::min(rows, groups * me / threads_here * 4);
            const int64_t last = std::min(rows, groups * (me + 1) / threads_here * 4);
            ops.products({site.fn.from(first * n), site.fn.type}, last - first, n, streams, tokens,
                         products + first, rows);
#pragma omp barrier
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            const float factor = ops.rms_factor(streams + t * n, n, sizes.norm_eps);
            ops.mixes(products + t * rows, factor, base, scale, sizes, pre + t * m, post + t * m,
                      comb + t * m * m);
        }
        if (collapsed != nullptr) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens * chunks; ++i) {
                const int64_t t = i / chunks, from = i % chunks * kColumns;
                ops.collapse(streams + t * n, pre + t * m, sizes, from,
                             std::min(sizes.hidden, from + kColumns), collapsed + t * sizes.hidden);
            }
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tokens; ++t) {
                float* row = collapsed + t * sizes.hidden;
                ops.rms_norm(row, &normed.weight, nullptr, sizes.hidden, normed.eps);
                ops.narrow(row, normed.type, sizes.hidden,
                           normed.out + t * sizes.hidden * plain_bytes(normed.type));
            }
        }
    }
}

// Work shared out over tokens and columns.
template <class Work>
void each_part(int64_t tokens, int64_t hidden, int64_t cost, int threads, Work work) {
    const int64_t chunks = (hidden + kColumns - 1) / kColumns;
    const int team = team_for(threads, tokens * hidden * cost, tokens * chunks);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < tokens * chunks; ++i) {
        const int64_t from = i % chunks * kColumns;
        work(i / chunks, from, std::min(hidden, from + kColumns));
    }
}

}  // namespace

void bind_hyper_connection(nb::module_& m) {
    m.def("hyper_enter", [](const LevelHandle& l, uintptr_t streams, int64_t tokens, int64_t count,
                            int64_t hidden, int rounds, float eps, float norm_eps, uintptr_t fn, int fn_type,
                            uintptr_t base, int base_type, uintptr_t scale, int scale_type, uintptr_t pre,
                            uintptr_t post, uintptr_t comb, uintptr_t collapsed, uintptr_t weight,
                            int weight_type, float weight_eps, uintptr_t out, int out_type, int threads) {
        nb::gil_scoped_release release;
        const Site site = {{count, hidden, rounds, eps, norm_eps},
                           floats_at(fn, fn_type),
                           floats_at(base, base_type),
                           floats_at(scale, scale_type)};
        enter(small_ops(*l.kernels), site, at<const float>(streams), tokens, at<float>(pre), at<float>(post),
              at<float>(comb), at<float>(collapsed),
              {floats_at(weight, weight_type), weight_eps, at<uint8_t>(out), static_cast<Plain>(out_type)},
              threads);
    });
    m.def("hyper_collapse", [](const LevelHandle& l, uintptr_t streams, uintptr_t pre, int64_t tokens,
                               int64_t count, int64_t hidden, uintptr_t out, int threads) {
        nb::gil_scoped_release release;
        const SmallOps& ops = small_ops(*l.kernels);
        const HyperSizes sizes = {count, hidden, 0, 0.0f, 0.0f};
        each_part(tokens, hidden, count, threads, [&](int64_t t, int64_t from, int64_t to) {
            ops.collapse(at<const float>(streams) + t * count * hidden, at<const float>(pre) + t * count,
                         sizes, from, to, at<float>(out) + t * hidden);
        });
    });
    m.def("hyper_spread",
          [](const LevelHandle& l, uintptr_t output, int output_type, uintptr_t post, uintptr_t comb,
             uintptr_t streams, int64_t tokens, int64_t count, int64_t hidden, uintptr_t out, int threads) {
              nb::gil_scoped_release release;
              const SmallOps& ops = small_ops(*l.kernels);
              const HyperSizes sizes = {count, hidden, 0, 0.0f, 0.0f};
              const Floats block = floats_at(output, output_type);
              float* wide = call_memory().floats(tokens * hidden);
              each_part(tokens, hidden, count * count, threads, [&](int64_t t, int64_t from, int64_t to) {
                  ops.widen(block.from(t * hidden + from), block.type, to - from, wide + t * hidden + from);
                  ops.spread(wide + t * hidden, at<const float>(post) + t * count,
                             at<const float>(comb) + t * count * count,
                             at<const float>(streams) + t * count * hidden, sizes, from, to,
                             at<float>(out) + t * count * hidden);
              });
          });
}
