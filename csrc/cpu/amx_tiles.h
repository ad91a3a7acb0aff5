// The tile registers of AMX: their shapes for one call, and the four instructions that products need.
//
// A dot of tiles is C[row][token] += sum over pairs of columns of A[row][pair] * B[pair][token], bfloat16 in,
// float32 out: the even and the odd columns are summed from zero, then both are added to C. An element of C
// depends on its own row and token only, so neighbours never change its bits. Subnormal inputs count as zero.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "weight.h"

namespace hadron::avx512_amx {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024;  // sixteen rows of 32 bfloat16

// Registers 0-3 hold sums, 4 and 5 weights, 6 and 7 activations, as long as this object lives.
class Tiles {
  public:
    // tokens: 1 to 16.
    explicit Tiles(int tokens) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } shape;
        static_assert(sizeof shape == 64);
        std::memset(&shape, 0, sizeof shape);
        shape.palette = 1;
        for (int i = 0; i < 8; ++i) {
            const bool weights = i == 4 || i == 5;
            shape.row_bytes[i] = static_cast<uint16_t>(weights ? 64 : 4 * tokens);
            shape.rows[i] = kTileRows;  // or pairs of columns
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The compilers' own intrinsics do not say that these read memory.
template <int kTile>
inline void load_tile(const void* from, int64_t row_stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* to, int64_t row_stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kSums, int kWeights, int kActivations>
inline void dot_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kWeights), "i"(kActivations));
}

// Of integers of 8 bits, four columns a word, to sums of 32.
template <int kSums, int kWeights, int kActivations>
inline void dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kWeights), "i"(kActivations));
}

// Sixteen vectors of sixteen words of 32 bits: rows become columns.
HADRON_LOCAL void transpose(__m512i* v) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int s = 1; s < 16; s *= 2) {
        const __m512i step = _mm512_set1_epi32(s), other = _mm512_set1_epi32(16);
        const __m512i swapped = _mm512_xor_si512(lane, step);
        const __mmask16 upper = _mm512_test_epi32_mask(lane, step);
        const __m512i low = _mm512_mask_add_epi32(lane, upper, swapped, other),
                      high = _mm512_mask_add_epi32(swapped, upper, lane, other);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if ((i & s) != 0) continue;
            const __m512i a = v[i], b = v[i | s];
            v[i] = _mm512_permutex2var_epi32(a, low, b);
            v[i | s] = _mm512_permutex2var_epi32(a, high, b);
        }
    }
}

}  // namespace
}  // namespace hadron::avx512_amx
