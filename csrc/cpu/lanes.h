// Queries against rows of a cache, at one instruction-set level: what attention and the indexer share.
//
// Queries (heads of a token, or tokens of a head) lie in lanes. A group of them shares every row that is
// read, so rows are used as they lie, and a maximum or a sum over rows never crosses lanes. A lane's bits
// depend on its own query and rows only.
#pragma once

#include <cstdint>

#include "level.h"
#include "ops_level.h"

namespace hadron {

constexpr int64_t kGroup = 32;   // queries of a group
constexpr int64_t kRanks = 128;  // rows of a block at most
constexpr int64_t kRows = 16;    // rows come in multiples of this: who calls repeats a row to fill up

// Functions for rows of one type: float32, or bfloat16 with bfloat16 dots.
struct RowOps {
    int64_t (*query_bytes)(int64_t width);
    // q [count][width], `stride` floats apart; count <= kGroup, the other lanes are zeros.
    void (*pack_queries)(const float* q, int64_t stride, int64_t count, int64_t width, uint8_t* out);
    // s[r][lane] = query of the lane . rows[r]; count: a multiple of kRows.
    void (*dots)(const uint8_t* queries, const uint8_t* const* rows, int64_t count, int64_t width, float* s);
    int64_t (*value_bytes)(int64_t columns);
    // The first `columns` elements of `count` rows, in the order in which `mix` reads them.
    void (*pack_values)(const uint8_t* const* rows, int64_t count, int64_t columns, uint8_t* out);
    // mixed[column][lane] = mixed * alpha[lane] + sum over r of weights[r][lane] * value[r][column].
    void (*mix)(const uint8_t* values, const float* weights, int64_t count, int64_t columns,
                const float* alpha, float* mixed);
};

struct LaneOps {
    RowOps full;         // float32 rows
    const RowOps* half;  // bfloat16 rows; null: who calls widens them
    // Scores become weights in place: e^(scale * s - maximum). Maxima and sums of the lanes move on, and
    // alpha is what older sums have to be multiplied by. limits: rows that a lane sees; null: all.
    void (*weigh)(float* s, int64_t count, const int64_t* limits, float scale, float* maxima, float* sums,
                  float* alpha);
    // A second part of the rows joins the first: mixed, maxima, sums.
    void (*join)(int64_t columns, float* mixed, float* maxima, float* sums, const float* mixed2,
                 const float* maxima2, const float* sums2);
    // out[lane][column] = mixed / sums; zeros where nothing was seen.
    void (*finish)(float* mixed, const float* sums, int64_t count, int64_t columns, float* const* out);
    // out[r] (+)= sum over lanes of weights[lane] * max(s[r][lane], 0); count: a multiple of kRows.
    void (*score)(const float* s, int64_t count, const float* weights, bool add, float* out);
    // out[t][column] = sum over i of q[t][i] * weight[first + i][column], rows in order.
    void (*absorb)(const Weight&, int64_t first, int64_t count, const float* const* q, int64_t tokens,
                   float* const* out, uint8_t* scratch);
    int64_t (*absorb_bytes)(const Weight&, int64_t tokens);  // of scratch
    // Channels of one pool: keys weighted by softmax(gates + table). keys, gates: rows of `size`.
    void (*pool)(const float* const* keys, const float* const* gates, const float* table, int64_t pool,
                 int64_t size, float* out);
    void (*widen)(const uint8_t* from, Plain type, int64_t n, float* out);
    void (*narrow)(const float* from, Plain type, int64_t n, uint8_t* out);
};

// Columns of `mixed`, zeros behind the last.
inline int64_t mixed_columns(int64_t columns) {
    return (columns + 31) / 32 * 32;
}

namespace baseline {
extern const LaneOps kLaneOps;
}
#if defined(HADRON_X86)
namespace avx2 {
extern const LaneOps kLaneOps;
}
namespace avx512 {
extern const LaneOps kLaneOps;
}
namespace avx512_bf16 {
extern const LaneOps kLaneOps;
}
#endif
#if defined(HADRON_AMX)
namespace avx512_amx {
extern const RowOps kHalf;  // all that differs from avx512_bf16
}
#endif

// The table that goes with a level.
const LaneOps& lane_ops(const Kernels& level);

}  // namespace hadron
