// Queries against bfloat16 rows at the level `avx512_amx`: sixteen rows, or sixteen columns of values, times
// sixteen lanes in a dot of tiles. Everything else is that of `avx512_bf16`.
#include "amx_tiles.h"
#include "formats.h"
#include "lanes.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kTileWidth = 32;  // elements of a row in a tile, or rows whose values one dot mixes
constexpr int64_t kSlice = 512;     // elements of sixteen rows that are brought together at a time
constexpr int64_t kLaneBytes = kGroup * 4;
static_assert(kGroup == 32 && kRows == kTileRows);

const RowOps& vectors() {
    return *avx512_bf16::kLaneOps.half;
}

inline int64_t tiles_of(int64_t width) {
    return (width + kTileWidth - 1) / kTileWidth;
}

inline __mmask32 first_words(int64_t count) {
    return count >= 32 ? 0xffffffffu : (1u << (count < 0 ? 0 : count)) - 1;
}

int64_t query_bytes(int64_t width) {
    return tiles_of(width) * kTileWidth / 2 * kLaneBytes;
}

// [pair of elements][lane][2], filled up to whole tiles with zeros.
void pack_queries(const float* q, int64_t stride, int64_t count, int64_t width, uint8_t* out) {
    vectors().pack_queries(q, stride, count, width, out);
    const int64_t packed = vectors().query_bytes(width);
    std::memset(out + packed, 0, static_cast<size_t>(query_bytes(width) - packed));
}

// sums += sixteen rows, `stride` bytes apart, times both halves of the lanes, over whole tiles of elements.
inline void dot_rows(const uint8_t* rows, int64_t stride, const uint8_t* queries, int64_t tiles) {
    for (int64_t k = 0; k < tiles; ++k) {
        const uint8_t* lanes = queries + k * kTileWidth / 2 * kLaneBytes;
        load_tile<4>(rows + k * 64, stride);
        load_tile<6>(lanes, kLaneBytes), dot_tiles<0, 4, 6>();
        load_tile<7>(lanes + 64, kLaneBytes), dot_tiles<1, 4, 7>();
    }
}

// The bytes from each of sixteen rows to the next, or 0 where they differ.
inline int64_t stride_of(const uint8_t* const* rows) {
    const int64_t stride = rows[1] - rows[0];
    for (int r = 2; r < kTileRows; ++r) {
        if (rows[r] - rows[r - 1] != stride) return 0;
    }
    return stride;
}

void dots(const uint8_t* queries, const uint8_t* const* rows, int64_t count, int64_t width, float* s) {
    alignas(64) uint8_t together[kTileRows][kSlice * 2];
    const Tiles shapes(16);
    for (int64_t r = 0; r < count; r += kTileRows) {
        clear_tile<0>(), clear_tile<1>();
        const int64_t stride = width % kTileWidth == 0 ? stride_of(rows + r) : 0;
        if (stride != 0) {
            dot_rows(rows[r], stride, queries, width / kTileWidth);
        } else {
            for (int64_t from = 0; from < width; from += kSlice) {
                const int64_t left = width - from, tiles = tiles_of(left < kSlice ? left : kSlice);
                for (int i = 0; i < kTileRows; ++i) {
                    for (int64_t k = 0; k < tiles; ++k) {
                        const __mmask32 have = first_words(left - k * kTileWidth);
                        const uint8_t* at = rows[r + i] + (from + k * kTileWidth) * 2;
                        _mm512_store_si512(together[i] + k * 64, _mm512_maskz_loadu_epi16(have, at));
                    }
                }
                dot_rows(together[0], kSlice * 2, queries + from / 2 * kLaneBytes, tiles);
            }
        }
        store_tile<0>(s + r * kGroup, kLaneBytes), store_tile<1>(s + r * kGroup + 16, kLaneBytes);
    }
}

// Values as tiles of sixteen columns by 32 rows, [columns / 16][rows / 32]; rows that are not there are
// zeros.
int64_t value_bytes(int64_t columns) {
    return mixed_columns(columns) / kTileRows * (kRanks / kTileWidth) * kTileBytes;
}

void pack_values(const uint8_t* const* rows, int64_t count, int64_t columns, uint8_t* out) {
    for (int64_t block = 0; block < tiles_of(count); ++block) {
        for (int64_t c = 0; c < columns; c += 32) {
            const __mmask32 have = first_words(columns - c);
            __m512i low[16], high[16];  // pairs of rows: columns 0-3, 8-11, ... and 4-7, 12-15, ...
            for (int64_t pair = 0; pair < 16; ++pair) {
                const int64_t r = block * kTileWidth + 2 * pair;
                const auto row = [&](int64_t i) {
                    return i < count ? _mm512_maskz_loadu_epi16(have, rows[i] + 2 * c)
                                     : _mm512_setzero_si512();
                };
                const __m512i a = row(r), b = row(r + 1);
                low[pair] = _mm512_unpacklo_epi16(a, b), high[pair] = _mm512_unpackhi_epi16(a, b);
            }
            transpose(low), transpose(high);
            const auto place = [&](int64_t column) {
                const int64_t tile = (c + column) / kTileRows * (kRanks / kTileWidth) + block;
                return out + tile * kTileBytes + column % kTileRows * 64;
            };
            for (int64_t i = 0; i < 16; ++i) {
                _mm512_store_si512(place(i / 4 * 8 + i % 4), low[i]);
                _mm512_store_si512(place(i / 4 * 8 + 4 + i % 4), high[i]);
            }
        }
    }
}

void mix(const uint8_t* values, const float* weights, int64_t count, int64_t columns, const float* alpha,
         float* mixed) {
    const int64_t blocks = tiles_of(count), wide = mixed_columns(columns);
    alignas(64) uint16_t even_odd[32];
    for (int j = 0; j < 16; ++j)
        even_odd[2 * j] = static_cast<uint16_t>(j), even_odd[2 * j + 1] = static_cast<uint16_t>(16 + j);
    const __m512i order = _mm512_load_si512(even_odd);
    alignas(64) uint8_t by_pairs[kRanks / 2][kLaneBytes];
    for (int64_t r = 0; r < blocks * kTileWidth; r += 2) {
        for (int j = 0; j < 2; ++j) {
            const auto of_row = [&](int64_t i) {
                return i < count ? _mm512_loadu_ps(weights + i * kGroup + 16 * j) : _mm512_setzero_ps();
            };
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(of_row(r + 1), of_row(r));
            _mm512_store_si512(by_pairs[r / 2] + 64 * j, _mm512_permutexvar_epi16(order, both));
        }
    }
    const __m512 a0 = _mm512_loadu_ps(alpha), a1 = _mm512_loadu_ps(alpha + 16);
    for (int64_t c = 0; c < wide; ++c) {
        float* at = mixed + c * kGroup;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), a0));
        _mm512_storeu_ps(at + 16, _mm512_mul_ps(_mm512_loadu_ps(at + 16), a1));
    }
    const Tiles shapes(16);
    for (int64_t c = 0; c < wide; c += kTileRows) {
        float* at = mixed + c * kGroup;
        load_tile<0>(at, kLaneBytes), load_tile<1>(at + 16, kLaneBytes);
        for (int64_t block = 0; block < blocks; ++block) {
            const uint8_t* lanes = by_pairs[block * kTileWidth / 2];
            load_tile<4>(values + (c / kTileRows * (kRanks / kTileWidth) + block) * kTileBytes, 64);
            load_tile<6>(lanes, kLaneBytes), dot_tiles<0, 4, 6>();
            load_tile<7>(lanes + 64, kLaneBytes), dot_tiles<1, 4, 7>();
        }
        store_tile<0>(at, kLaneBytes), store_tile<1>(at + 16, kLaneBytes);
    }
}

}  // namespace

constinit const RowOps kHalf = {query_bytes, pack_queries, dots, value_bytes, pack_values, mix};

}  // namespace hadron::avx512_amx
