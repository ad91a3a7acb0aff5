// Codes of eight bits or more at the level `avx2`: float32 products, straight from the codes.
//
// Codes of 32 columns, a step, become four vectors of eight float32, times their scale where it lies inside
// the row, each into an accumulator of its own; these are added up in one fixed order at the end. So a sum
// does not depend on how many tokens share a call: up to three take the vectors from registers, more from
// rows that are unpacked to memory first.
#pragma once

#include <immintrin.h>

#include "formats.h"
#include "level.h"

namespace hadron::avx2 {
namespace {

constexpr int64_t kStep = 32;
constexpr int kTokens = 3;              // times four accumulators
constexpr int64_t kTileRows = 8;        // unpacked at a time
constexpr int64_t kTileColumns = 512;   // of them: they and those of the tokens stay in L1
constexpr int64_t kPassTokens = 96;     // whose sums with those rows stay in L2
constexpr int64_t kFloatsAhead = 2048;  // bytes
constexpr int64_t kApart = 576;         // bytes, so that the tokens of a pass do not share sets of the caches

// v = even, odd words of the first sixteen, then of the others.
struct UnpackBf16 {
    static constexpr int64_t kBytes = 2 * kStep;
    static constexpr float kFactor = 1.0f;
    HADRON_LOCAL static void to(const uint8_t* codes, __m256* v) {
        for (int i = 0; i < 2; ++i) {
            const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + i);
            v[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            v[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
        }
    }
};

// Moved by a bit, a code is a half-precision number a 256th of its value; but for NaN.
struct UnpackE4m3 {
    static constexpr int64_t kBytes = kStep;
    static constexpr float kFactor = 256.0f;
    HADRON_LOCAL static void to(const uint8_t* codes, __m256* v) {
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i nan =
            _mm256_cmpeq_epi8(_mm256_and_si256(c, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x7f));
        const __m256i low = half(_mm256_unpacklo_epi8(_mm256_setzero_si256(), c)),
                      high = half(_mm256_unpackhi_epi8(_mm256_setzero_si256(), c));
        v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
        v[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
        v[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
        v[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
        if (_mm256_movemask_epi8(nan) != 0) {
            for (int k = 0; k < kStep; ++k) {
                if ((codes[k] & 0x7f) == 0x7f) v[k / 8][k % 8] = from_bits(0x7fc00000u);
            }
        }
    }

  private:
    static __m256i half(__m256i moved) {
        return _mm256_and_si256(_mm256_srai_epi16(moved, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    }
};

struct UnpackInt8 {
    static constexpr int64_t kBytes = kStep;
    static constexpr float kFactor = 1.0f;
    HADRON_LOCAL static void to(const uint8_t* codes, __m256* v) {
        for (int i = 0; i < 4; ++i) {
            const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
            v[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
        }
    }
};

struct UnpackF32 {
    static constexpr int64_t kBytes = 4 * kStep;
    static constexpr float kFactor = 1.0f;
    HADRON_LOCAL static void to(const uint8_t* codes, __m256* v) {
        for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(codes) + 8 * i);
    }
};

struct UnpackF16 {
    static constexpr int64_t kBytes = 2 * kStep;
    static constexpr float kFactor = 1.0f;
    HADRON_LOCAL static void to(const uint8_t* codes, __m256* v) {
        for (int i = 0; i < 4; ++i)
            v[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + i));
    }
};

inline bool scales_inside(const Weight& w) {
    return w.granularity == Granularity::block || w.granularity == Granularity::group;
}

inline bool takes_floats(const Weight& w) {
    if (w.zeros || (scales_inside(w) && w.block_columns % kStep != 0)) return false;
    return w.element == Element::bf16 || w.element == Element::e4m3 || w.element == Element::int8 ||
           w.element == Element::f32 || w.element == Element::f16;
}

inline int64_t float_steps(const Weight& w) {
    return (w.columns + kStep - 1) / kStep;
}
inline int64_t float_bytes(const Weight& w) {
    return float_steps(w) * kStep * 4 + kApart;
}

inline void prepare_floats(const Weight& w, const float* x, uint8_t* prepared) {
    auto* out = reinterpret_cast<float*>(prepared);
    const int64_t wide = float_steps(w) * kStep;
    if (w.rounds()) {
        for (int64_t k = 0; k < w.columns; ++k) out[k] = bf16_value(to_bf16(x[k]));
    } else {
        std::memcpy(out, x, static_cast<size_t>(w.columns) * sizeof(float));
    }
    for (int64_t k = w.columns; k < wide; ++k) out[k] = 0.0f;
    if (w.element != Element::bf16) return;
    for (int64_t k = 0; k < wide; k += 16) {  // even ones first
        const __m256 low = _mm256_load_ps(out + k), high = _mm256_load_ps(out + k + 8);
        const __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
        const auto in_order = [](__m256 v) {
            return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
        };
        _mm256_store_ps(out + k, in_order(even));
        _mm256_store_ps(out + k + 8, in_order(odd));
    }
}

// The steps of one row in turn.
template <class Unpack, bool kScaled>
class FloatRow {
  public:
    FloatRow(const Weight& w, int64_t row)
        : w_(w), codes_(w.codes + row * w.row_bytes), scales_(kScaled ? w.scale_row(row) : 0) {}

    HADRON_LOCAL void step(int64_t s, __m256* v) {
        const uint8_t* at = codes_ + s * Unpack::kBytes;
        _mm_prefetch(reinterpret_cast<const char*>(at + kFloatsAhead), _MM_HINT_T0);
        if (Unpack::kBytes > 64)
            _mm_prefetch(reinterpret_cast<const char*>(at + kFloatsAhead + 64), _MM_HINT_T0);
        uint8_t last[Unpack::kBytes];
        if ((s + 1) * kStep > w_.columns) {
            std::memset(last, 0, sizeof last);
            std::memcpy(last, at, static_cast<size_t>((w_.columns - s * kStep) * (Unpack::kBytes / kStep)));
            at = last;
        }
        Unpack::to(at, v);
        if constexpr (kScaled) {
            if (s * kStep >= until_) {
                const int64_t group = s * kStep / w_.block_columns;
                until_ = (group + 1) * w_.block_columns;
                scale_ = _mm256_set1_ps(scale_value(w_, scales_ + group) * Unpack::kFactor);
            }
            for (int i = 0; i < 4; ++i) v[i] = _mm256_mul_ps(v[i], scale_);
        }
    }

  private:
    const Weight& w_;
    const uint8_t* codes_;
    const int64_t scales_;
    int64_t until_ = 0;  // columns that scale_ is of
    __m256 scale_ = _mm256_setzero_ps();
};

inline float sum_of_lanes(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float sum_of(const __m256* acc) {
    return sum_of_lanes(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3])));
}

// One rounding, wherever this is inlined.
inline float with_bias(const Weight& w, int64_t row, float sum, float scale) {
    return __builtin_fmaf(sum, scale, w.bias ? load<float>(w.bias, row) : 0.0f);
}

template <class Unpack, bool kScaled>
float float_result(const Weight& w, int64_t row, const __m256* acc) {
    return with_bias(w, row, sum_of(acc), row_scale(w, row) * (kScaled ? 1.0f : Unpack::kFactor));
}

// acc[t] += the vectors of a step times those of token t.
template <int kSome>
HADRON_LOCAL void add_step(const __m256* v, const float* const* x, int64_t column, __m256 (*acc)[4]) {
    for (int t = 0; t < kSome; ++t) {
        for (int i = 0; i < 4; ++i)
            acc[t][i] = _mm256_fmadd_ps(v[i], _mm256_load_ps(x[t] + column + 8 * i), acc[t][i]);
    }
}

template <class Unpack, bool kScaled, int kSome>
void few_floats(const Weight& w, const float* const* x, int64_t first, int64_t last, float* const* y) {
    for (int64_t row = first; row < last; ++row) {
        FloatRow<Unpack, kScaled> from(w, row);
        __m256 acc[kSome][4];
        for (auto& of_token : acc) {
            for (auto& a : of_token) a = _mm256_setzero_ps();
        }
        for (int64_t s = 0; s < float_steps(w); ++s) {
            __m256 v[4];
            from.step(s, v);
            add_step<kSome>(v, x, s * kStep, acc);
        }
        for (int t = 0; t < kSome; ++t) y[t][row] = float_result<Unpack, kScaled>(w, row, acc[t]);
    }
}

// kRows unpacked rows, [row][column], with the sums of all tokens, [row][token][32], brought along: one
// vector of each step after the other, so that sums of four rows and three tokens are registers.
template <int kRows, int kSome>
HADRON_LOCAL void add_tile(const float* tile, int64_t columns, const float* const* x, int64_t begin,
                           float* sums, int64_t tokens) {
    for (int64_t i = 0; i < kStep; i += 8) {
        __m256 acc[kRows][kSome];
        const auto held = [&](int r, int t) { return sums + (r * tokens + t) * kStep + i; };
        for (int r = 0; r < kRows; ++r) {
            for (int t = 0; t < kSome; ++t) acc[r][t] = _mm256_load_ps(held(r, t));
        }
        for (int64_t k = i; k < columns; k += kStep) {
            __m256 own[kSome];
            for (int t = 0; t < kSome; ++t) own[t] = _mm256_load_ps(x[t] + begin + k);
            for (int r = 0; r < kRows; ++r) {
                const __m256 v = _mm256_load_ps(tile + r * kTileColumns + k);
                for (int t = 0; t < kSome; ++t) acc[r][t] = _mm256_fmadd_ps(v, own[t], acc[r][t]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int t = 0; t < kSome; ++t) _mm256_store_ps(held(r, t), acc[r][t]);
        }
    }
}

template <int kSome>
void add_tile_rows(const float* tile, int64_t rows, int64_t columns, const float* const* x, int64_t begin,
                   float* sums, int64_t tokens) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        add_tile<4, kSome>(tile + r * kTileColumns, columns, x, begin, sums + r * tokens * kStep, tokens);
    for (; r < rows; ++r)
        add_tile<1, kSome>(tile + r * kTileColumns, columns, x, begin, sums + r * tokens * kStep, tokens);
}

template <class Unpack, bool kScaled>
void many_floats(const Weight& w, const float* const* x, int64_t tokens, int64_t first, int64_t last,
                 float* const* y, uint8_t* scratch) {
    auto* tile = reinterpret_cast<float*>(scratch);
    float* sums = tile + kTileRows * kTileColumns;
    const int64_t wide = float_steps(w) * kStep;
    for (int64_t from = first; from < last; from += kTileRows) {
        const int64_t rows = last - from < kTileRows ? last - from : kTileRows;
        std::memset(sums, 0, static_cast<size_t>(rows * tokens * kStep * 4));
        for (int64_t begin = 0; begin < wide; begin += kTileColumns) {
            const int64_t columns = wide - begin < kTileColumns ? wide - begin : kTileColumns;
            for (int64_t r = 0; r < rows; ++r) {
                FloatRow<Unpack, kScaled> of(w, from + r);
                for (int64_t k = 0; k < columns; k += kStep) {
                    __m256 v[4];
                    of.step((begin + k) / kStep, v);
                    for (int i = 0; i < 4; ++i) _mm256_store_ps(tile + r * kTileColumns + k + 8 * i, v[i]);
                }
            }
            int64_t t = 0;
            for (; t + kTokens <= tokens; t += kTokens)
                add_tile_rows<kTokens>(tile, rows, columns, x + t, begin, sums + t * kStep, tokens);
            if (tokens - t == 2)
                add_tile_rows<2>(tile, rows, columns, x + t, begin, sums + t * kStep, tokens);
            if (tokens - t == 1)
                add_tile_rows<1>(tile, rows, columns, x + t, begin, sums + t * kStep, tokens);
        }
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < tokens; ++t) {
                __m256 acc[4];
                for (int i = 0; i < 4; ++i) acc[i] = _mm256_load_ps(sums + (r * tokens + t) * kStep + 8 * i);
                y[t][from + r] = float_result<Unpack, kScaled>(w, from + r, acc);
            }
        }
    }
}

inline int64_t float_scratch(int64_t tokens) {
    return tokens <= kTokens ? 64 : kTileRows * (kTileColumns + kPassTokens * kStep) * 4;
}

template <class Unpack, bool kScaled>
void floats_by_scale(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                     uint8_t* scratch) {
    const auto* of_tokens = reinterpret_cast<const float* const*>(x.rows);
    switch (x.tokens) {
        case 1:
            return few_floats<Unpack, kScaled, 1>(w, of_tokens, first, last, y);
        case 2:
            return few_floats<Unpack, kScaled, 2>(w, of_tokens, first, last, y);
        case 3:
            return few_floats<Unpack, kScaled, 3>(w, of_tokens, first, last, y);
        default:
            for (int64_t t = 0; t < x.tokens; t += kPassTokens) {
                const int64_t some = x.tokens - t < kPassTokens ? x.tokens - t : kPassTokens;
                many_floats<Unpack, kScaled>(w, of_tokens + t, some, first, last, y + t, scratch);
            }
    }
}

template <class Unpack>
void floats_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
               uint8_t* scratch) {
    if (scales_inside(w)) return floats_by_scale<Unpack, true>(w, x, first, last, y, scratch);
    return floats_by_scale<Unpack, false>(w, x, first, last, y, scratch);
}

inline void rows_of_floats(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                           uint8_t* scratch) {
    switch (w.element) {
        case Element::bf16:
            return floats_of<UnpackBf16>(w, x, first, last, y, scratch);
        case Element::e4m3:
            return floats_of<UnpackE4m3>(w, x, first, last, y, scratch);
        case Element::int8:
            return floats_of<UnpackInt8>(w, x, first, last, y, scratch);
        case Element::f16:
            return floats_of<UnpackF16>(w, x, first, last, y, scratch);
        default:
            return floats_of<UnpackF32>(w, x, first, last, y, scratch);
    }
}

}  // namespace
}  // namespace hadron::avx2
