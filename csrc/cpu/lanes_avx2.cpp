// Queries against rows at the level `avx2`: the common source, compiled for it.
#include <cstring>
#include <limits>

#include "formats.h"
#include "lanes.h"

namespace hadron::avx2 {
namespace {
#pragma GCC diagnostic ignored "-Wunused-function"
#include "vectors.inc"
//
#include "lanes.inc"

void absorb(const Weight& w, int64_t first, int64_t count, const float* const* q, int64_t tokens,
            float* const* out, uint8_t* scratch) {
    absorb_any(kKernels.dequantize, w, first, count, q, tokens, out, scratch);
}
}  // namespace

const LaneOps kLaneOps = {{query_bytes, pack_queries, dots, value_bytes, pack_values, mix},
                          nullptr,
                          weigh,
                          join,
                          finish,
                          score,
                          absorb,
                          absorb_bytes,
                          pool,
                          widen,
                          narrow};

}  // namespace hadron::avx2
