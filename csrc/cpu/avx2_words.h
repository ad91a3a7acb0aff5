// FP4 in groups at the level `avx2`: products of sixteen-bit integers, straight from the packed codes.
//
// Codes of 64 columns, a block, unpack by a shuffle of bytes to four vectors of sixteen words: twice their
// value, and a constant that keeps them positive. Activations become integers of sixteen bits, relative to
// the largest of 128 columns, a chunk: those of at least 1/128 of it lose nothing that bfloat16 has, the
// others at most 2^-16 of it. The sums of a block are exact, each lane those of eight columns, so that every
// lane has one scale. A block is always
//
//     acc = sum * (scale of the codes * scale of the activations) + acc
//
// in eight lanes that are added up in one fixed order at the end, whatever the number of tokens.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "avx2_floats.h"

namespace hadron::avx2 {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kChunk = 128;
constexpr int64_t kBlockBytes = 32;      // of codes
constexpr int64_t kPreparedBlock = 160;  // four vectors of words, one of what the constant adds, negative
constexpr int kWordTokens = 4;           // at a time: their sums and a block's codes are all registers
constexpr int64_t kWordRows = 32;        // whose codes of a slice stay in L1, as that of the tokens does
constexpr int64_t kSlice = 8;            // chunks
constexpr int64_t kWordsAhead = 2048;    // bytes

// The constant: 12, and in the upper byte of a word, whose shuffle finds code 0, 12 again.
constexpr int kRaised = 12, kConstant = kRaised * 256 + kRaised;

inline bool takes_words(const Weight& w) {
    if (w.element != Element::e2m1 || !w.rounds() || w.granularity != Granularity::group || w.zeros)
        return false;
    return w.scale_type == ScaleType::e8m0 ? w.block_columns == 32
                                           : w.scale_type == ScaleType::e4m3 && w.block_columns == 16;
}

inline int64_t word_chunks(const Weight& w) {
    return (w.columns + kChunk - 1) / kChunk;
}

// Blocks, then the scale of each chunk.
inline int64_t word_bytes(const Weight& w) {
    return word_chunks(w) * 2 * kPreparedBlock + (word_chunks(w) * 4 + 63) / 64 * 64;
}

inline const float* word_scales(const Weight& w, const uint8_t* prepared) {
    return reinterpret_cast<const float*>(prepared + word_chunks(w) * 2 * kPreparedBlock);
}

inline void prepare_words(const Weight& w, const float* x, uint8_t* prepared) {
    auto* scales = const_cast<float*>(word_scales(w, prepared));
    for (int64_t c = 0; c < word_chunks(w); ++c) {
        const int64_t have = w.columns - c * kChunk < kChunk ? w.columns - c * kChunk : kChunk;
        uint32_t bits[kChunk] = {}, largest = 0;
        for (int64_t k = 0; k < have; ++k) bits[k] = static_cast<uint32_t>(to_bf16(x[c * kChunk + k])) << 16;
        for (uint32_t each : bits) largest = (each & 0x7fffffffu) > largest ? each & 0x7fffffffu : largest;
        // of not more than 32767; the scale is half of theirs, since codes are twice their value
        const bool finite = largest < 0x7f800000u;
        const uint32_t exponent = largest >> 23 < 16 ? 16 : largest >> 23;
        const float inverse = finite ? from_bits((268 - exponent) << 23) : 0.0f;
        scales[c] = finite ? from_bits((exponent - 15) << 23) : from_bits(0x7fc00000u);
        int32_t fixed[kChunk];
        for (int64_t k = 0; k < kChunk; ++k)
            fixed[k] = finite ? static_cast<int32_t>(__builtin_rintf(from_bits(bits[k]) * inverse)) : 0;
        for (int64_t b = 0; b < 2; ++b, prepared += kPreparedBlock) {
            auto* words = reinterpret_cast<int16_t*>(prepared);
            auto* added = reinterpret_cast<int32_t*>(prepared + 128);
            for (int64_t i = 0; i < 4; ++i) {
                for (int64_t j = 0; j < 16; ++j)
                    words[16 * i + j] = static_cast<int16_t>(fixed[b * kBlock + 4 * j + i]);
            }
            for (int64_t lane = 0; lane < 8; ++lane) {
                int32_t sum = 0;
                for (int64_t k = 0; k < 8; ++k) sum += fixed[b * kBlock + 8 * lane + k];
                added[lane] = -kConstant * sum;
            }
        }
    }
}

// Eight scales of groups.
inline __m256 e8m0_scales(const uint8_t* codes) {
    const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256i zero = _mm256_cmpeq_epi32(c, _mm256_setzero_si256()),
                  nan = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(255));
    const __m256i tiny =
        _mm256_or_si256(_mm256_slli_epi32(c, 23), _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
    return _mm256_castsi256_ps(_mm256_or_si256(tiny, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000))));
}

// Codes of eight bits are, moved by a bit, half-precision numbers a 256th of theirs; but for NaN.
inline __m256 e4m3_scales(const uint8_t* codes) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), eight);
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m256i magnitude = _mm256_and_si256(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(0x7f));
    const __m256i nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    return _mm256_or_ps(_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f)),
                        _mm256_castsi256_ps(_mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000))));
}

// Of whole chunks, with room for one load more; behind the last of a row they multiply zeros.
inline int64_t scales_of_row(const Weight& w) {
    return (word_chunks(w) * kChunk / w.block_columns + 15) / 8 * 8;
}

inline void convert_scales(const Weight& w, int64_t row, float* to) {
    const int64_t count = (w.columns + w.block_columns - 1) / w.block_columns;
    const uint8_t* from = w.scales + w.scale_row(row);
    const bool powers = w.scale_type == ScaleType::e8m0;
    for (int64_t g = 0; g < scales_of_row(w); g += 8) {
        uint8_t last[8] = {};
        const uint8_t* at = from + g;
        if (g + 8 > count) {
            if (g < count) std::memcpy(last, at, static_cast<size_t>(count - g));
            at = last;
        }
        _mm256_storeu_ps(to + g, powers ? e8m0_scales(at) : e4m3_scales(at));
    }
}

// What a block's codes are multiplied with by.
struct WordTables {
    __m256i values, low, deal;
    int64_t groups;  // of a block

    explicit WordTables(const Weight& w) : groups(kBlock / w.block_columns) {
        alignas(32) uint8_t twice[32];
        for (uint32_t code = 0; code < 32; ++code)
            twice[code] =
                static_cast<uint8_t>(kRaised + static_cast<int>(2 * code_value(Element::e2m1, code & 15u)));
        values = _mm256_load_si256(reinterpret_cast<const __m256i*>(twice));
        low = _mm256_set1_epi16(15);
        deal =
            groups == 2 ? _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0) : _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    }
    HADRON_LOCAL __m256 scales(const float* from) const {
        return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), deal);
    }
    HADRON_LOCAL void unpack(const uint8_t* codes, __m256i* w) const {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        w[0] = _mm256_shuffle_epi8(values, _mm256_and_si256(v, low));
        w[1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
        w[2] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(v, 8), low));
        w[3] = _mm256_shuffle_epi8(values, _mm256_srli_epi16(v, 12));
    }
};

// The exact sums of a block, eight columns a lane.
HADRON_LOCAL __m256 block_sums(const __m256i* w, const uint8_t* x) {
    const auto* words = reinterpret_cast<const __m256i*>(x);
    __m256i sum = _mm256_load_si256(words + 4);
    for (int i = 0; i < 4; ++i)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w[i], _mm256_load_si256(words + i)));
    return _mm256_cvtepi32_ps(sum);
}

// acc[t] += chunks [begin, end) of a row times token t. scales: of the row.
template <int kTokens>
HADRON_LOCAL void add_words(const Weight& w, const WordTables& tables, const uint8_t* codes,
                            const float* scales, const uint8_t* const* x, int64_t begin, int64_t end,
                            __m256* acc) {
    const int64_t whole = w.columns / kChunk;
    for (int64_t c = begin; c < end; ++c) {
        const uint8_t* at = codes + c * 2 * kBlockBytes;
        uint8_t last[2 * kBlockBytes];
        if (c >= whole) {
            std::memset(last, 0, sizeof last);
            std::memcpy(last, at, static_cast<size_t>((w.columns - c * kChunk + 1) / 2));
            at = last;
        }
        _mm_prefetch(reinterpret_cast<const char*>(at + kWordsAhead), _MM_HINT_T0);
        for (int64_t b = 0; b < 2; ++b) {
            __m256i v[4];
            tables.unpack(at + b * kBlockBytes, v);
            const __m256 scale = tables.scales(scales + (2 * c + b) * tables.groups);
            for (int t = 0; t < kTokens; ++t) {
                // first the scales: sums times the larger one could be infinite
                const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(word_scales(w, x[t]) + c));
                acc[t] = _mm256_fmadd_ps(block_sums(v, x[t] + (2 * c + b) * kPreparedBlock), both, acc[t]);
            }
        }
    }
}

inline float finished(const Weight& w, int64_t row, __m256 acc) {
    return sum_of_lanes(acc) * row_scale(w, row) + (w.bias ? load<float>(w.bias, row) : 0.0f);
}

// Scratch: the scales of kWordRows rows, and their sums with kWordTokens tokens.
inline int64_t word_scratch(const Weight& w) {
    return kWordRows * (scales_of_row(w) * 4 + kWordTokens * 32);
}

// A group of rows with up to kWordTokens tokens, a slice of columns after the other.
template <int kTokens>
void word_rows(const Weight& w, const WordTables& tables, const uint8_t* const* x, int64_t first,
               int64_t count, const float* scales, float* sums, float* const* y) {
    const int64_t n = word_chunks(w), slice = kTokens == 1 ? n : kSlice;
    for (int64_t begin = 0; begin < n; begin += slice) {
        const int64_t end = begin + slice < n ? begin + slice : n;
        for (int64_t r = 0; r < count; ++r) {
            __m256 acc[kTokens];
            float* held = sums + r * kTokens * 8;
            for (int t = 0; t < kTokens; ++t)
                acc[t] = begin ? _mm256_load_ps(held + 8 * t) : _mm256_setzero_ps();
            add_words<kTokens>(w, tables, w.codes + (first + r) * w.row_bytes, scales + r * scales_of_row(w),
                               x, begin, end, acc);
            for (int t = 0; t < kTokens; ++t) {
                if (end < n) {
                    _mm256_store_ps(held + 8 * t, acc[t]);
                } else {
                    y[t][first + r] = finished(w, first + r, acc[t]);
                }
            }
        }
    }
}

inline void rows_of_words(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                          uint8_t* scratch) {
    const WordTables tables(w);
    auto* sums = reinterpret_cast<float*>(scratch);
    float* scales = sums + kWordRows * kWordTokens * 8;
    for (int64_t from = first; from < last; from += kWordRows) {
        const int64_t count = last - from < kWordRows ? last - from : kWordRows;
        for (int64_t r = 0; r < count; ++r) convert_scales(w, from + r, scales + r * scales_of_row(w));
        for (int64_t t = 0; t < x.tokens; t += kWordTokens) {
            const auto part = [&](auto tokens) {
                word_rows<decltype(tokens)::value>(w, tables, x.rows + t, from, count, scales, sums, y + t);
            };
            switch (x.tokens - t) {
                case 1:
                    part(std::integral_constant<int, 1>());
                    break;
                case 2:
                    part(std::integral_constant<int, 2>());
                    break;
                case 3:
                    part(std::integral_constant<int, 3>());
                    break;
                default:
                    part(std::integral_constant<int, kWordTokens>());
            }
        }
    }
}

}  // namespace
}  // namespace hadron::avx2
