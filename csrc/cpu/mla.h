// Attention over cached latents: drivers that share work out over threads.
//
// A cached row is a latent of `rank` elements, then the rotated key that all heads share; FP8 rows are as in
// cached_rows.h. kv_b_proj
// [heads * (nope + v), rank] stays in its stored scheme: its key rows turn a query into one over latents,
// its value rows turn the mix of latents into the output, head by head, once for every 64 tokens.
#pragma once

#include <cstdint>

#include "cached_rows.h"

namespace hadron {

struct MlaSizes {
    int64_t heads, nope, rope, v, rank;
    float scale;  // of q.k
    int64_t width() const { return rank + rope; }
};

// Rows of one layer, [blocks][page_size].
struct LatentPages {
    const uint8_t* rows;
    RowType type;
    int64_t blocks, page_size;
};

// Positions each token attends to, ascending, -1: none; and the block tables of their requests.
struct Selection {
    const int64_t* positions;  // [tokens][width]
    int64_t width;
    const int64_t* tables;  // [requests][pages], -1 beyond
    int64_t requests, pages;
    const int64_t* owners;  // [tokens]: request
};

// out [tokens][heads * v] from query [tokens][heads][nope + rope], both of `type`. std::out_of_range for a
// position outside its table and for a block outside the cache.
void sparse_attend(const Kernels&, const Weight& kv_b, const MlaSizes&, const LatentPages&, const Selection&,
                   const uint8_t* query, Plain type, int64_t tokens, uint8_t* out, int threads);

// The same for the last `tokens` tokens of one request, each over all positions up to its own; keys and
// values are expanded. table: [pages].
void dense_attend(const Kernels&, const Weight& kv_b, const MlaSizes&, const LatentPages&,
                  const int64_t* table, int64_t pages, int64_t length, const uint8_t* query, Plain type,
                  int64_t tokens, uint8_t* out, int threads);

}  // namespace hadron
