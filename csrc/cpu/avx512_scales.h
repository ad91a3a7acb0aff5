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

// The same for the usual case: every code normal and positive, which a shift settles.
inline __m512 e8m0_scales(__m128i codes) {
    const int odd = _mm_movemask_epi8(
        _mm_or_si128(_mm_cmpeq_epi8(codes, _mm_setzero_si128()), _mm_cmpeq_epi8(codes, _mm_set1_epi8(-1))));
    if (odd != 0) return e8m0_vector(codes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23));
}

inline __m512 e4m3_scales(__m128i codes) {
    // 8 .. 126 are the normal positive ones
    if (_mm_cmpgt_epu8_mask(_mm_sub_epi8(codes, _mm_set1_epi8(8)), _mm_set1_epi8(118)) != 0) {
        return e4m3_vector(codes);
    }
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 20), _mm512_set1_epi32(120 << 23)));
}

// Scales whose groups are known when compiling: sixteen are converted at once and dealt to lanes.
enum class Deal { none, e8m0_32, e4m3_16 };

inline Deal deal(const Weight& w) {
    if (w.granularity != Granularity::group) return Deal::none;
    if (w.scale_type == ScaleType::e8m0 && w.block_columns == 32) return Deal::e8m0_32;
    if (w.scale_type == ScaleType::e4m3 && w.block_columns == 16) return Deal::e4m3_16;
    return Deal::none;
}

// Which of sixteen scales each lane takes, for every chunk that they cover (and every half of it).
template <ScaleShape kShape, Deal kDeal>
struct DealtTo {
    static constexpr int kGroup = kDeal == Deal::e8m0_32 ? 32 : 16;
    static constexpr int kChunks = 16 * kGroup / kChunk;
    static constexpr int kHalves = kShape == ScaleShape::halves ? 2 : 1;
    alignas(64) int32_t index[kChunks][kHalves][16];

    constexpr DealtTo() : index{} {
        for (int c = 0; c < kChunks; ++c) {
            for (int h = 0; h < kHalves; ++h) {
                for (int lane = 0; lane < 16; ++lane) {
                    const int column = kHalves == 2 ? 64 * h + lane / 4 * 16 : lane * 8;
                    index[c][h][lane] = (c * kChunk + column) / kGroup;
                }
            }
        }
    }
};

template <ScaleShape kShape, Deal kDeal = Deal::none>
class Scales {
  public:
    Scales(const Weight& w, int64_t row) : w_(w), row_(row), at_(w.scale_row(row)) {
        if constexpr (kShape != ScaleShape::after) {
            count_ = (w.columns + w.block_columns - 1) / w.block_columns;
        }
    }

    // The scales of chunk c: scale[0], or scale[0] and scale[1] for halves. Chunks are asked for in order.
    void chunk(int64_t c, __m512* scale) {
        if constexpr (kShape == ScaleShape::chunk) {
            scale[0] = _mm512_set1_ps(scale_value(w_, at_ + c * kChunk / w_.block_columns));
        } else if constexpr (kShape != ScaleShape::after && kDeal != Deal::none) {
            constexpr int kChunks = DealtTo<kShape, kDeal>::kChunks;
            const int64_t part = c & (kChunks - 1);
            if (part == 0) load(c / kChunks * 16);
            for (int h = 0; h < DealtTo<kShape, kDeal>::kHalves; ++h) {
                scale[h] = _mm512_permutexvar_ps(_mm512_load_si512(kDealt.index[part][h]), sixteen_);
            }
        } else if constexpr (kShape == ScaleShape::lanes) {
            scale[0] = gathered(c * kChunk, 8, 1);
        } else if constexpr (kShape == ScaleShape::halves) {
            for (int h = 0; h < 2; ++h) scale[h] = gathered(c * kChunk + 64 * h, 16, 4);
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
    static constexpr DealtTo<kShape, kDeal> kDealt{};

    // Scales base .. base + 15 of the row. Lanes beyond the last multiply zeros; a code of 0 is finite.
    void load(int64_t base) {
        const int64_t left = count_ - base;
        const uint8_t* from = w_.scales + at_ + base;
        const __m128i codes = left >= 16
                                  ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))
                                  : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << left) - 1), from);
        sixteen_ = kDeal == Deal::e8m0_32 ? e8m0_scales(codes) : e4m3_scales(codes);
    }

    // Lane l covers the columns from `from` + l / together * width on.
    __m512 gathered(int64_t from, int width, int together) const {
        alignas(64) float lanes[16];
        for (int l = 0; l < 16; ++l) {
            const int64_t index = (from + l / together * width) / w_.block_columns;
            lanes[l] = index < count_ ? scale_value(w_, at_ + index) : 0.0f;
        }
        return _mm512_load_ps(lanes);
    }

    const Weight& w_;
    int64_t row_, at_, count_ = 0;
    __m512 sixteen_ = _mm512_setzero_ps();
};

}  // namespace
}  // namespace hadron::avx512_bf16
