// The sparse-attention indexer: stores keys (each token's, or one for a pool of tokens) and selects.
#pragma once

#include <cstdint>
#include <optional>

#include "lanes.h"

namespace hadron {

// Keys of one layer, [blocks][rows_per_page][size]; a row stands for `pool` tokens.
struct IndexPages {
    uint8_t* rows;
    Plain type;
    int64_t blocks, rows_per_page, size, pool;
};

// A step's requests: new tokens and tokens after the step of each, block tables [requests][pages].
struct IndexStep {
    const int64_t* query_lens;
    const int64_t* lengths;
    int64_t requests;
    const int64_t* tables;
    int64_t pages;
    int64_t tokens;
};

// Keys [tokens][size] go to their slots [tokens]. Pooled: gates [tokens][size], table [pool][size]; what is
// open waits in tails [state slots][2][pool - 1][size], keys then gates. std::out_of_range for a slot
// outside.
void store_keys(const Kernels&, const IndexPages&, const IndexStep&, const int64_t* slots, const float* keys,
                const float* gates, const float* table, float* tails, const int64_t* state_slots);

struct NotFinite {
    int64_t token, key;
    float score;
};

// The `count` best rows each token sees, as positions in `out` [tokens][width], ascending, -1 beyond; with
// `tail` those of the open pool behind them. query [tokens][heads][size] of `type`, weights [tokens][heads],
// positions [tokens]. The first score that is not finite, where there is one.
std::optional<NotFinite> select_keys(const Kernels&, const IndexPages&, const IndexStep&,
                                     const uint8_t* query, Plain type, const float* weights,
                                     const int64_t* positions, int64_t heads, int64_t count, bool tail,
                                     int64_t* out, int64_t width, int threads);

}  // namespace hadron
