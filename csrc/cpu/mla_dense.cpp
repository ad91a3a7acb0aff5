// Dense prefill: keys and values of one request are expanded head by head, and queries lie in lanes instead
// of heads. Outside the promise on bits: blocks count positions, and a step decides which tokens share lanes.
#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "mla.h"
#include "row_blocks.h"
#include "workspace.h"

namespace hadron {
namespace {

struct Buffers {
    Workspace prepared, packed, scratch;
};
Buffers& buffers() {
    thread_local Buffers of_thread;
    return of_thread;
}

}  // namespace

void dense_attend(const Kernels& k, const Weight& w, const MlaSizes& n, const LatentPages& cache,
                  const int64_t* table, int64_t pages, int64_t length, const uint8_t* query, Plain type,
                  int64_t tokens, uint8_t* out, int threads) {
    const LaneOps& ops = lane_ops(k);
    const CachedRows format(k, cache.type, n.rank, n.rope);
    const Plain held = format.type();
    const int64_t element = plain_bytes(held), key = n.nope + n.rope, start = length - tokens;
    if (length > pages * cache.page_size)
        throw std::out_of_range("position " + std::to_string(length - 1) + " lies outside a table of " +
                                std::to_string(pages) + " pages");
    std::vector<const uint8_t*> latents(static_cast<size_t>(length));
    for (int64_t i = 0; i < length; ++i) {
        const int64_t block = table[i / cache.page_size];
        if (block < 0 || block >= cache.blocks)
            throw std::out_of_range("a selected position lies in a block outside 0 .. " +
                                    std::to_string(cache.blocks - 1));
        latents[static_cast<size_t>(i)] =
            cache.rows + (block * cache.page_size + i % cache.page_size) * format.bytes();
    }
    const int64_t stride = aligned(k.prepared_bytes(w)), row = n.nope + n.v;
    uint8_t* prepared = buffers().prepared.bytes(stride * length);
    std::vector<const uint8_t*> x(static_cast<size_t>(length));
    for (int64_t i = 0; i < length; ++i) x[static_cast<size_t>(i)] = prepared + i * stride;

    const int64_t packed_bytes = k.bytes_packed(w, length);
    uint8_t* packed = packed_bytes != 0 ? buffers().packed.bytes(packed_bytes) : nullptr;

    const int64_t expanded = aligned(length * row * 4), rows = aligned(length * (key + n.v) * element),
                  wide = aligned(std::max(kGroup * key, n.width()) * 4),
                  products = aligned(k.scratch_bytes(w, length)), state = Mixed::bytes(n.v),
                  results = aligned(kGroup * n.v * 4),
                  blocks = aligned(RowBlocks::bytes(ops, held, key, n.v)),
                  bytes = expanded + rows + wide + products + state + results + blocks;
    const auto workers = static_cast<int>(std::clamp<int64_t>(n.heads, 1, std::max(1, threads)));
    uint8_t* scratch = buffers().scratch.bytes(bytes * workers);
#pragma omp parallel num_threads(workers)
    {
        uint8_t* mine = scratch + omp_get_thread_num() * bytes;
        auto* both = reinterpret_cast<float*>(mine);
        uint8_t* of_rows = mine + expanded;
        auto* q = reinterpret_cast<float*>(of_rows + rows);
        uint8_t* of_products = of_rows + rows + wide;
        Mixed mixed(of_products + products, n.v);
        auto* result = reinterpret_cast<float*>(of_products + products + state);
        RowBlocks over(ops, held, key, n.v, n.scale, of_products + products + state + results);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < length; ++i) {
            format.latent(latents[static_cast<size_t>(i)], q);
            k.prepare(w, q, prepared + i * stride);
        }
        if (packed != nullptr) {
            k.pack(w, x.data(), length, omp_get_thread_num(), omp_get_num_threads(), packed);
#pragma omp barrier
        }
        std::vector<float*> y(static_cast<size_t>(length));
        std::vector<const uint8_t*> keys(static_cast<size_t>(length)), values(static_cast<size_t>(length));
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < n.heads; ++h) {
            for (int64_t i = 0; i < length; ++i) {
                y[static_cast<size_t>(i)] = reinterpret_cast<float*>(
                    reinterpret_cast<uintptr_t>(both + i * row) - static_cast<uintptr_t>(h * row) * 4);
            }
            k.rows(w, {x.data(), packed, length}, h * row, (h + 1) * row, y.data(), of_products);
            // Keys get their rotary part; both are rounded to what the cache holds, or is widened to.
            for (int64_t i = 0; i < length; ++i) {
                const auto at = static_cast<size_t>(i);
                uint8_t* to = of_rows + i * (key + n.v) * element;
                ops.narrow(both + i * row, held, n.nope, to);
                format.key(latents[at], to + n.nope * element);
                ops.narrow(both + i * row + n.nope, held, n.v, to + key * element);
                keys[at] = to, values[at] = to + key * element;
            }
            for (int64_t first = 0; first < tokens; first += kGroup) {
                const int64_t some = std::min(kGroup, tokens - first);
                int64_t limits[kGroup] = {};
                float* to[kGroup];
                for (int64_t i = 0; i < some; ++i) {
                    ops.widen(query + ((first + i) * n.heads + h) * key * plain_bytes(type), type, key,
                              q + i * key);
                    limits[i] = start + first + i + 1;
                    to[i] = result + i * n.v;
                }
                over.queries(q, key, some);
                mixed.clear(n.v);
                over.run(keys.data(), values.data(), limits[some - 1], limits, mixed);
                ops.finish(mixed.mixed, mixed.sums, some, n.v, to);
                for (int64_t i = 0; i < some; ++i) {
                    ops.narrow(to[i], type, n.v, out + ((first + i) * n.heads + h) * n.v * plain_bytes(type));
                }
            }
        }
    }
}

}  // namespace hadron
