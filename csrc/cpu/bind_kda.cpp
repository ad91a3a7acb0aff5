// KDA of all requests of a step in one call: work is shared out by request and head.
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

// Tokens of a request from which on heads are handed out in groups; below, a thread's heads lie together
// and each fetches the next.
constexpr int64_t kMany = 4;
// Heads whose pieces of a sequence are taken in turn: a token's inputs are pages apart, those of its heads
// lie together, and walking to a page costs more than reading from it.
constexpr int64_t kGroup = 8;

void kda(const SmallOps& ops, const KdaLayer& layer, const std::vector<KdaRun>& runs, int threads) {
    const int64_t heads = layer.heads, items = static_cast<int64_t>(runs.size()) * heads;
    int64_t longest = 0, tokens = 0;
    for (const KdaRun& run : runs) {
        longest = std::max(longest, run.tokens);
        tokens += run.tokens;
    }
    const int team = team_for(threads, tokens * heads * layer.key * layer.key * 4, items);
    const int64_t mine = (ops.kda_scratch(layer) + 63) / 64 * 64;
    uint8_t* memory = call_memory().bytes(team * mine);
    const auto state = [&](int64_t item) {
        return runs[static_cast<size_t>(item / heads)].state + item % heads * layer.key * layer.key;
    };
    const auto work = [&](int64_t item, int64_t first, const float* ahead) {
        ops.kda_head(layer, runs[static_cast<size_t>(item / heads)], item % heads, first, ahead,
                     memory + omp_get_thread_num() * mine);
    };
    // Heads that a thread takes together.
    const int64_t group = std::clamp<int64_t>(items / (2 * team), 1, kGroup);
#pragma omp parallel num_threads(team) if (team > 1)
    {
        if (longest >= kMany) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t from = 0; from < items; from += group) {
                const int64_t end = std::min(items, from + group);
                for (int64_t first = 0; first < longest; first += kKdaTokens) {
                    for (int64_t item = from; item < end; ++item) {
                        if (first < runs[static_cast<size_t>(item / heads)].tokens)
                            work(item, first, nullptr);
                    }
                }
            }
        } else {
            const int64_t here = omp_get_num_threads(), me = omp_get_thread_num();
            const int64_t end = items * (me + 1) / here;
            for (int64_t item = items * me / here; item < end; ++item)
                work(item, 0, item + 1 < end ? state(item + 1) : nullptr);
        }
    }
}

}  // namespace

void bind_kda(nb::module_& m) {
    nb::class_<KdaLayer>(m, "KdaLayer");
    m.def("kda_layer", [](int64_t heads, int64_t key, int64_t kernel, uintptr_t taps, uintptr_t rate,
                          uintptr_t dt_bias, uintptr_t norm, float eps, float lower_bound, bool bounded) {
        return KdaLayer{heads,
                        key,
                        kernel,
                        at<const float>(taps),
                        at<const float>(rate),
                        at<const float>(dt_bias),
                        at<const float>(norm),
                        eps,
                        lower_bound,
                        bounded};
    });
    m.def("kda", [](const LevelHandle& l, const KdaLayer& layer, uintptr_t q, uintptr_t k, uintptr_t v,
                    uintptr_t forget, uintptr_t beta, uintptr_t gate, int type, uintptr_t out,
                    uintptr_t windows, int window_type, uintptr_t states, const std::vector<int64_t>& slots,
                    const std::vector<int64_t>& lengths, int threads) {
        if (slots.size() != lengths.size()) throw std::invalid_argument("a slot for every request");
        nb::gil_scoped_release release;
        const int64_t width = layer.heads * layer.key, bytes = plain_bytes(static_cast<Plain>(type));
        const int64_t window = 3 * width * (layer.kernel - 1) * plain_bytes(static_cast<Plain>(window_type));
        std::vector<KdaRun> runs;
        int64_t first = 0;
        for (size_t i = 0; i < slots.size(); ++i) {
            const auto rows = [&](uintptr_t base, int64_t size) {
                return at<uint8_t>(base) + first * size * bytes;
            };
            runs.push_back({rows(q, width), rows(k, width), rows(v, width), rows(forget, width),
                            rows(gate, width), rows(beta, layer.heads), rows(out, width),
                            static_cast<Plain>(type), lengths[i], at<uint8_t>(windows) + slots[i] * window,
                            static_cast<Plain>(window_type),
                            at<float>(states) + slots[i] * layer.heads * layer.key * layer.key});
            first += lengths[i];
        }
        kda(small_ops(*l.kernels), layer, runs, threads);
    });
}
