// Codes of four bits in vectors of 256 bits: products of sixteen-bit integers, straight from the packed
// codes.
//
// Codes of 64 columns, a block, unpack by a shuffle of bytes to four vectors of sixteen words: their value
// (of FP4 twice that), and a constant that keeps them positive. Activations become integers of sixteen bits,
// relative to the largest of 128 columns, a chunk: those of at least 1/128 of it lose nothing that bfloat16
// has, the others at most 2^-16 of it. The sums of a block are exact, each lane those of eight columns, so
// that every lane has one scale and zero point. A block is always
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
constexpr int64_t kPreparedBlock = 160;  // four vectors of words, one of what takes the constant off
constexpr int kWordTokens = 4;           // at a time: their sums and a block's codes are all registers
constexpr int64_t kWordRows = 32;        // whose codes of a slice stay in L1, as that of the tokens does
constexpr int64_t kSlice = 8;            // chunks
constexpr int64_t kWordsAhead = 2048;    // bytes

inline bool takes_words(const Weight& w) {
    if (!w.rounds()) return false;
    if (w.element == Element::int4)
        return w.granularity != Granularity::block &&
               (w.granularity != Granularity::group || w.block_columns % 8 == 0);
    if (w.element != Element::e2m1 || w.granularity != Granularity::group || w.zeros) return false;
    return w.scale_type == ScaleType::e8m0 ? w.block_columns == 32
                                           : w.scale_type == ScaleType::e4m3 && w.block_columns == 16;
}

// What a word of a code is beside its value: what makes that positive, and in the upper byte, whose shuffle
// finds code 0, that code's again. INT4's is raised as it is stored.
inline int raised(Element element) {
    return element == Element::e2m1 ? 12 : 8;
}
inline int constant(Element element) {
    return element == Element::e2m1 ? 12 * 256 + 12 : 8;
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

// 64 integers in the order of columns to words in the order in which codes unpack: vector i, word j is column
// 4 j + i. Then what takes the constant off: so many times the sums of eight.
inline void store_words(const __m256i* fixed, int times, uint8_t* to) {
    const __m256i by_rest = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9,
                                             2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i four[4], two[4];
    for (int m = 0; m < 4;
         ++m) {  // four vectors of pairs of words, by what columns leave when divided by four
        const __m256i words =
            _mm256_permute4x64_epi64(_mm256_packs_epi32(fixed[2 * m], fixed[2 * m + 1]), 0xd8);
        four[m] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, by_rest), halves);
    }
    for (int m = 0; m < 4; m += 2) {
        two[m] = _mm256_unpacklo_epi64(four[m], four[m + 1]);
        two[m + 1] = _mm256_unpackhi_epi64(four[m], four[m + 1]);
    }
    auto* out = reinterpret_cast<__m256i*>(to);
    for (int i = 0; i < 2; ++i) {
        _mm256_store_si256(out + i, _mm256_permute2x128_si256(two[i], two[2 + i], 0x20));
        _mm256_store_si256(out + 2 + i, _mm256_permute2x128_si256(two[i], two[2 + i], 0x31));
    }
    __m256i sums[4];
    for (int m = 0; m < 4; ++m) sums[m] = _mm256_hadd_epi32(fixed[2 * m], fixed[2 * m + 1]);
    // of the lower halves of vectors 0 to 3 and of their upper halves, then 4 to 7
    const __m256i low = _mm256_hadd_epi32(sums[0], sums[1]), high = _mm256_hadd_epi32(sums[2], sums[3]);
    const __m256i sum = _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                         _mm256_permute2x128_si256(low, high, 0x31));
    _mm256_store_si256(out + 4, _mm256_mullo_epi32(sum, _mm256_set1_epi32(times)));
}

inline uint32_t largest_of(__m256i v) {
    alignas(32) uint32_t each[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(each), v);
    for (int i = 1; i < 8; ++i) each[0] = each[i] > each[0] ? each[i] : each[0];
    return each[0];
}

inline void prepare_words(const Weight& w, const float* x, uint8_t* prepared) {
    auto* scales = const_cast<float*>(word_scales(w, prepared));
    const uint32_t half = w.element == Element::e2m1 ? 1 : 0;  // since codes are twice their value
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi32(1);
    for (int64_t c = 0; c < word_chunks(w); ++c) {
        const int64_t have = w.columns - c * kChunk < kChunk ? w.columns - c * kChunk : kChunk;
        float part[kChunk] = {};
        const float* from = x + c * kChunk;
        if (have < kChunk)
            from = static_cast<float*>(std::memcpy(part, from, static_cast<size_t>(have) * sizeof(float)));
        __m256i v[16], most = _mm256_setzero_si256();
        for (int i = 0; i < 16; ++i) {  // to bfloat16, as integers; NaN are larger than all others before
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
            const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
            const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
            v[i] = _mm256_and_si256(nearest, _mm256_set1_epi32(-65536));
            most = _mm256_max_epu32(most, _mm256_and_si256(bits, magnitude));
            most = _mm256_max_epu32(most, _mm256_and_si256(v[i], magnitude));
        }
        const uint32_t largest = largest_of(most);
        const bool finite = largest < 0x7f800000u;
        const uint32_t exponent = largest >> 23 < 16 ? 16 : largest >> 23;  // integers of at most 32767
        const __m256 inverse = _mm256_set1_ps(finite ? from_bits((268 - exponent) << 23) : 0.0f);
        scales[c] = finite ? from_bits((exponent - 14 - half) << 23) : from_bits(0x7fc00000u);
        for (int i = 0; i < 16; ++i) {
            v[i] = finite ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(v[i]), inverse))
                          : _mm256_setzero_si256();
        }
        for (int b = 0; b < 2; ++b, prepared += kPreparedBlock)
            store_words(v + 8 * b, -constant(w.element), prepared);
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

// Numbers of a row's scales: of whole chunks, with room for one load more; behind the last they multiply
// zeros. INT4's stand once for each lane, and behind them an eighth of each zero point, if there are any: as
// the constant of codes has eight times the activations.
inline int64_t scales_of_row(const Weight& w) {
    const int64_t columns = w.element == Element::int4 ? 8 : w.block_columns;
    return (word_chunks(w) * kChunk / columns + 15) / 8 * 8 * (w.zeros ? 2 : 1);
}

inline void deal_int4(const Weight& w, int64_t row, float* to) {
    const bool groups = w.granularity == Granularity::group;
    const int64_t half = scales_of_row(w) / 2;
    std::memset(to, 0, static_cast<size_t>(scales_of_row(w)) * 4);
    for (int64_t lane = 0; lane < (w.columns + 7) / 8; ++lane) {
        const int64_t group = groups ? lane * 8 / w.block_columns : 0;
        to[lane] = groups ? scale_value(w, w.scale_row(row) + group) : 1.0f;
        if (w.zeros) to[half + lane] = static_cast<float>(w.zero(row, group)) * 0.125f;
    }
}

inline void convert_scales(const Weight& w, int64_t row, float* to) {
    if (w.element == Element::int4) return deal_int4(w, row, to);
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

// What turns a block's codes into words, and deals scales to lanes.
struct WordTables {
    __m256i values, low, deal;
    int64_t groups;  // of a block

    explicit WordTables(const Weight& w)
        : low(_mm256_set1_epi16(15)), groups(w.element == Element::int4 ? 8 : kBlock / w.block_columns) {
        alignas(32) uint8_t words[32];
        const int times = w.element == Element::e2m1 ? 2 : 1;
        for (uint32_t code = 0; code < 32; ++code) {
            const float value = code_value(w.element, code & 15u) * static_cast<float>(times);
            words[code] = static_cast<uint8_t>(raised(w.element) + static_cast<int>(value));
        }
        values = _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
        alignas(32) int32_t of_lane[8];
        for (int lane = 0; lane < 8; ++lane) of_lane[lane] = static_cast<int32_t>(lane * groups / 8);
        deal = _mm256_load_si256(reinterpret_cast<const __m256i*>(of_lane));
    }
    HADRON_LOCAL __m256 scales(const float* from) const {
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), deal);
    }
    HADRON_LOCAL void unpack(const uint8_t* codes, __m256i* w) const {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        w[0] = _mm256_shuffle_epi8(values, _mm256_and_si256(v, low));
        w[1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
        w[2] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(v, 8), low));
        w[3] = _mm256_shuffle_epi8(values, _mm256_srli_epi16(v, 12));
    }
};

// The exact sums of a block, eight columns a lane. zeros: eighths of zero points.
template <bool kZeros>
HADRON_LOCAL __m256 block_sums(const __m256i* w, const uint8_t* x, __m256 zeros) {
    const auto* words = reinterpret_cast<const __m256i*>(x);
    const __m256i constant = _mm256_load_si256(words + 4);
    __m256i sum = constant;
    for (int i = 0; i < 4; ++i)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w[i], _mm256_load_si256(words + i)));
    if constexpr (kZeros)
        return _mm256_fmadd_ps(zeros, _mm256_cvtepi32_ps(constant), _mm256_cvtepi32_ps(sum));
    return _mm256_cvtepi32_ps(sum);
}

// acc[t] += chunks [begin, end) of a row times token t. scales: of the row.
template <int kSome, bool kZeros>
HADRON_LOCAL void add_words(const Weight& w, const WordTables& tables, const uint8_t* codes,
                            const float* scales, const uint8_t* const* x, int64_t begin, int64_t end,
                            __m256* acc) {
    const int64_t whole = w.columns / kChunk;
    const float* zeros = scales + scales_of_row(w) / 2;
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
            const int64_t block = 2 * c + b;
            __m256i v[4];
            tables.unpack(at + b * kBlockBytes, v);
            const __m256 scale = tables.scales(scales + block * tables.groups);
            const __m256 zero = kZeros ? _mm256_loadu_ps(zeros + block * 8) : _mm256_setzero_ps();
            for (int t = 0; t < kSome; ++t) {
                // first the scales: sums times the larger one could be infinite
                const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(word_scales(w, x[t]) + c));
                const __m256 sums = block_sums<kZeros>(v, x[t] + block * kPreparedBlock, zero);
                acc[t] = _mm256_fmadd_ps(sums, both, acc[t]);
            }
        }
    }
}

// Scratch: the scales of kWordRows rows, and their sums with kWordTokens tokens.
inline int64_t word_scratch(const Weight& w) {
    return kWordRows * (scales_of_row(w) * 4 + kWordTokens * 32);
}

// A group of rows with up to kWordTokens tokens, a slice of columns after the other.
template <int kSome, bool kZeros>
void word_rows(const Weight& w, const WordTables& tables, const uint8_t* const* x, int64_t first,
               int64_t count, const float* scales, float* sums, float* const* y) {
    const int64_t n = word_chunks(w), slice = kSome == 1 ? n : kSlice;
    for (int64_t begin = 0; begin < n; begin += slice) {
        const int64_t end = begin + slice < n ? begin + slice : n;
        for (int64_t r = 0; r < count; ++r) {
            __m256 acc[kSome];
            float* held = sums + r * kSome * 8;
            for (int t = 0; t < kSome; ++t)
                acc[t] = begin ? _mm256_load_ps(held + 8 * t) : _mm256_setzero_ps();
            add_words<kSome, kZeros>(w, tables, w.codes + (first + r) * w.row_bytes,
                                     scales + r * scales_of_row(w), x, begin, end, acc);
            for (int t = 0; t < kSome; ++t) {
                if (end < n) {
                    _mm256_store_ps(held + 8 * t, acc[t]);
                } else {
                    y[t][first + r] = with_bias(w, first + r, sum_of_lanes(acc[t]), row_scale(w, first + r));
                }
            }
        }
    }
}

template <bool kZeros>
void words_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
              uint8_t* scratch) {
    const WordTables tables(w);
    auto* sums = reinterpret_cast<float*>(scratch);
    float* scales = sums + kWordRows * kWordTokens * 8;
    for (int64_t from = first; from < last; from += kWordRows) {
        const int64_t count = last - from < kWordRows ? last - from : kWordRows;
        for (int64_t r = 0; r < count; ++r) convert_scales(w, from + r, scales + r * scales_of_row(w));
        for (int64_t t = 0; t < x.tokens; t += kWordTokens) {
            const auto part = [&](auto some) {
                word_rows<decltype(some)::value, kZeros>(w, tables, x.rows + t, from, count, scales, sums,
                                                         y + t);
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

inline void rows_of_words(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                          uint8_t* scratch) {
    w.zeros ? words_of<true>(w, x, first, last, y, scratch) : words_of<false>(w, x, first, last, y, scratch);
}

}  // namespace
}  // namespace hadron::avx2
