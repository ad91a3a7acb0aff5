// Scales of a row as vectors for the lanes of a chunk's dot.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace hadron::avx512_bf16 {
namespace {

inline __m512 e8m0_vector(__m128i codes) {
    const __m512i c = _mm512_cvtepu8_epi32(codes);
    const __m512i bits = _mm512_slli_epi32(c, 23);
    const __mmask16 zero = _mm512_cmpeq_epi32_mask(c, _mm512_setzero_si512());
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(255));
    const __m512i tiny = _mm512_mask_mov_epi32(bits, zero, _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(tiny, nan, _mm512_set1_epi32(0x7fc00000)));
}

inline __m512 e4m3_vector(__m128i codes) {
    const __m512i c = _mm512_cvtepu8_epi32(codes);
    const __m512i magnitude = _mm512_and_si512(c, _mm512_set1_epi32(0x7f));
    const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    const __m512 tiny = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
    const __mmask16 subnormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    __m512i bits = _mm512_mask_mov_epi32(normal, subnormal, _mm512_castps_si512(tiny));
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(c, _mm512_set1_epi32(0x80)), 24);
    return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
}

// Scales of sixteen lanes of which lane l has scale index[l].
inline __m512 gather_scales(const Weight& w, int64_t row_at, int64_t count, const int64_t* index) {
    alignas(64) float lanes[16];
    for (int l = 0; l < 16; ++l) lanes[l] = index[l] < count ? scale_value(w, row_at + index[l]) : 0.0f;
    return _mm512_load_ps(lanes);
}

template <ScaleShape kShape>
class Scales {
  public:
    Scales(const Weight& w, int64_t row) : w_(w), row_(row), at_(w.scale_row(row)) {
        if constexpr (kShape != ScaleShape::after)
            count_ = (w.columns + w.block_columns - 1) / w.block_columns;
        // The published formats: sixteen scales are converted at once and dealt to lanes by a permute.
        fast_ = kShape == ScaleShape::lanes || kShape == ScaleShape::halves;
        fast_ = fast_ && (w.scale_type == ScaleType::e8m0 || w.scale_type == ScaleType::e4m3);
        fast_ = fast_ && (w.block_columns == 32 || w.block_columns == 16);
    }

    // scale[0], or scale[0] and scale[1] for halves.
    void chunk(int64_t c, __m512* scale) {
        if constexpr (kShape == ScaleShape::chunk) {
            scale[0] = _mm512_set1_ps(scale_value(w_, at_ + c * kChunk / w_.block_columns));
        } else if constexpr (kShape == ScaleShape::lanes) {
            scale[0] = fast_ ? dealt(c * kChunk, 8, 1) : gathered(c * kChunk, 8, 1);
        } else if constexpr (kShape == ScaleShape::halves) {
            for (int h = 0; h < 2; ++h) {
                const int64_t from = c * kChunk + 64 * h;
                scale[h] = fast_ ? dealt(from, 16, 4) : gathered(from, 16, 4);
            }
        }
    }

    // Zero points of the lanes of a chunk; INT4 only.
    __m512 zero(int64_t c) const {
        alignas(64) float lanes[16];
        for (int l = 0; l < 16; ++l) {
            const int64_t group = (c * kChunk + 8 * l) / w_.block_columns;
            lanes[l] = group < count_ ? static_cast<float>(w_.zero(row_, group)) : 0.0f;
        }
        return _mm512_load_ps(lanes);
    }

  private:
    // Lane l covers the columns from `from` + l / together * width on.
    __m512 gathered(int64_t from, int width, int together) const {
        int64_t index[16];
        for (int l = 0; l < 16; ++l) index[l] = (from + l / together * width) / w_.block_columns;
        return gather_scales(w_, at_, count_, index);
    }

    __m512 dealt(int64_t from, int width, int together) {
        const int64_t group = from / w_.block_columns, base = group & ~int64_t{15};
        if (base != base_) {
            base_ = base;
            const int64_t left = count_ - base;
            const __mmask16 have = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
            const __m128i codes = _mm_maskz_loadu_epi8(have, w_.scales + at_ + base);
            // Lanes beyond the last scale multiply zeros; a code of 0 is finite.
            sixteen_ = w_.scale_type == ScaleType::e8m0 ? e8m0_vector(codes) : e4m3_vector(codes);
        }
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        // groups of 32 columns: eight columns a lane are a quarter of one, sixteen a half
        const int shift = (w_.block_columns == 32 ? 1 : 0) + (together == 4 ? 2 : 0) + (width == 8 ? 1 : 0);
        const __m512i index = _mm512_add_epi32(_mm512_srl_epi32(lane, _mm_cvtsi32_si128(shift)),
                                               _mm512_set1_epi32(static_cast<int>(group - base)));
        return _mm512_permutexvar_ps(index, sixteen_);
    }

    const Weight& w_;
    int64_t row_, at_, count_ = 0, base_ = -1;
    bool fast_ = false;
    __m512 sixteen_ = _mm512_setzero_ps();
};

}  // namespace
}  // namespace hadron::avx512_bf16
