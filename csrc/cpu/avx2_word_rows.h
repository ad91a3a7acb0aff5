// Rows of codes of four or six bits times tokens: few from registers, many from words in memory
// (`avx2_words.h`); of six bits always from memory.
#pragma once

#include <type_traits>

#include "avx2_six.h"
#include "avx2_words.h"

namespace hadron::avx2 {
namespace {

constexpr int kGroup = 4;              // tokens whose sums and half a chunk's codes are all registers
constexpr int64_t kFewTokens = 8;      // from registers
constexpr int64_t kFewRows = 32;       // whose codes of a slice stay in L1, as that of a group does
constexpr int64_t kSlice = 8;          // chunks
constexpr int64_t kManyRows = 8;       // unpacked at a time: a slice of them and a group's stay in L1
constexpr int64_t kManyTokens = 128;   // whose sums with those rows stay in L2
constexpr int64_t kCodesAhead = 2048;  // bytes

using Chunks = const PreparedChunk*;  // of a token

// acc + a chunk of a token. sums: exact, of the lanes; zeros: see `scales_of_row`.
template <bool kZeros>
HADRON_LOCAL __m256 with_chunk(__m256 acc, __m256i sums, __m256 scale, __m256 zeros, const PreparedChunk& x) {
    __m256 values = _mm256_cvtepi32_ps(sums);
    if constexpr (kZeros) values = _mm256_fmadd_ps(zeros, _mm256_cvtepi32_ps(x.constant), values);
    // first the scales: sums times the larger one could be infinite
    return _mm256_fmadd_ps(values, _mm256_mul_ps(scale, _mm256_set1_ps(x.scale)), acc);
}

// GCC would make a tree of a chain of sums, and keep all of its leaves in memory.
HADRON_LOCAL __m256i added(__m256i sum, __m256i words, __m256i x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words, x));
    asm("" : "+x"(sum));
    return sum;
}

// The exact sums of a chunk: with one token by bytes, whose sums of sixteen bits have room for a chunk, else
// by words.
HADRON_LOCAL void exact_sums(const FourBitTables& tables, const uint8_t* codes, const PreparedChunk& x,
                             const PreparedBytes& bytes, __m256i* sum) {
    __m256i codes_of[kByteVectors], upper, lower;
    tables.unpack<0>(codes, codes_of);
    tables.unpack<1>(codes, codes_of + 2);
    for (int i = 0; i < kByteVectors; ++i) {
        const __m256i u = _mm256_maddubs_epi16(codes_of[i], bytes.upper[i]);
        const __m256i l = _mm256_maddubs_epi16(codes_of[i], bytes.lower[i]);
        upper = i == 0 ? u : _mm256_add_epi16(upper, u);
        lower = i == 0 ? l : _mm256_add_epi16(lower, l);
    }
    const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(upper, _mm256_set1_epi16(256)),
                                          _mm256_madd_epi16(lower, _mm256_set1_epi16(-1)));
    *sum = _mm256_add_epi32(both, x.constant);
}

template <int kSome>
HADRON_LOCAL void exact_sums(const FourBitTables& tables, const uint8_t* codes, const Chunks* x,
                             int64_t chunk, __m256i* sums) {
    __m256i words[4];
    tables.unpack_words<0>(codes, words);
    for (int t = 0; t < kSome; ++t) {
        sums[t] = x[t][chunk].constant;
        for (int i = 0; i < 4; ++i) sums[t] = added(sums[t], words[i], x[t][chunk].words[i]);
    }
    tables.unpack_words<1>(codes, words);
    for (int t = 0; t < kSome; ++t) {
        for (int i = 0; i < 4; ++i) sums[t] = added(sums[t], words[i], x[t][chunk].words[4 + i]);
    }
}

// acc[t] += chunks [begin, end) of a row times token t. scales: of the row.
template <int kSome, bool kZeros>
HADRON_LOCAL void add_chunks(const Weight& w, const FourBitTables& tables, const uint8_t* codes,
                             const float* scales, const Chunks* x, int64_t begin, int64_t end, __m256* acc) {
    const float* zeros = scales + scales_of_row(w) / 2;
    const PreparedBytes* bytes = bytes_behind(w, x[0]);
    for (int64_t c = begin; c < end; ++c) {
        ChunkCodes<4> of_chunk;
        const uint8_t* at = of_chunk(w, codes, c);
        _mm_prefetch(reinterpret_cast<const char*>(at + kCodesAhead), _MM_HINT_T0);
        __m256i sums[kSome];
        if constexpr (kSome == 1) {
            exact_sums(tables, at, x[0][c], bytes[c], sums);
        } else {
            exact_sums<kSome>(tables, at, x, c, sums);
        }
        const __m256 scale = tables.scales(scales + c * tables.groups);
        const __m256 zero = kZeros ? tables.scales(zeros + c * tables.groups) : _mm256_setzero_ps();
        for (int t = 0; t < kSome; ++t) acc[t] = with_chunk<kZeros>(acc[t], sums[t], scale, zero, x[t][c]);
    }
}

// Some rows with up to kGroup tokens, a slice of columns after the other.
template <int kSome, bool kZeros>
void few_rows(const Weight& w, const FourBitTables& tables, const Chunks* x, int64_t first, int64_t count,
              const float* scales, float* sums, float* const* y) {
    const int64_t n = word_chunks(w), slice = kSome == 1 ? n : kSlice;
    for (int64_t begin = 0; begin < n; begin += slice) {
        const int64_t end = begin + slice < n ? begin + slice : n;
        for (int64_t r = 0; r < count; ++r) {
            __m256 acc[kSome];
            float* held = sums + r * kSome * 8;
            for (int t = 0; t < kSome; ++t)
                acc[t] = begin ? _mm256_load_ps(held + 8 * t) : _mm256_setzero_ps();
            add_chunks<kSome, kZeros>(w, tables, w.codes + (first + r) * w.row_bytes,
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
void few_tokens(const Weight& w, const FourBitTables& tables, const Prepared& x, int64_t first, int64_t last,
                float* const* y, float* sums) {
    float* scales = sums + kFewRows * kGroup * 8;
    const auto* of_tokens = reinterpret_cast<const Chunks*>(x.rows);
    // one token takes whole rows, of whose scales fewer leave L1 to its activations
    const int64_t most = x.tokens == 1 ? 2 : kFewRows;
    for (int64_t from = first; from < last; from += most) {
        const int64_t count = last - from < most ? last - from : most;
        for (int64_t r = 0; r < count; ++r) convert_scales(w, from + r, scales + r * scales_of_row(w));
        for (int64_t t = 0; t < x.tokens; t += kGroup) {
            const auto part = [&](auto some) {
                few_rows<decltype(some)::value, kZeros>(w, tables, of_tokens + t, from, count, scales, sums,
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
                    part(std::integral_constant<int, kGroup>());
            }
        }
    }
}

// A chunk of a row, unpacked; scales and zero points of its lanes.
struct UnpackedChunk {
    __m256i words[kVectors];
    __m256 scale, zeros;
};
// A slice of some rows.
using WordTile = UnpackedChunk[kManyRows][kSlice];

template <bool kZeros, class Tables>
HADRON_LOCAL void unpack_slice(const Weight& w, const Tables& tables, int64_t row, const float* scales,
                               int64_t begin, int64_t end, UnpackedChunk* to) {
    const float* zeros = scales + scales_of_row(w) / 2;
    for (int64_t c = begin; c < end; ++c, ++to) {
        ChunkCodes<Tables::kBits> of_chunk;
        const uint8_t* at = of_chunk(w, w.codes + row * w.row_bytes, c);
        _mm_prefetch(reinterpret_cast<const char*>(at + kCodesAhead), _MM_HINT_T0);
        tables.unpack_chunk(at, to->words);
        to->scale = tables.scales(scales + c * tables.groups);
        if constexpr (kZeros) to->zeros = tables.scales(zeros + c * tables.groups);
    }
}

// The chunks [begin, end) of kRows rows, one after another in a tile, times kSome tokens join
// sums[token][kManyRows].
template <int kRows, int kSome, bool kZeros>
HADRON_LOCAL void add_words_of(const UnpackedChunk (*tile)[kSlice], const Chunks* x, int64_t begin,
                               int64_t end, __m256* sums) {
    Chunks from[kSome];
    for (int t = 0; t < kSome; ++t) from[t] = x[t] + begin;
    const UnpackedChunk* chunk = tile[0];
    for (const UnpackedChunk* last = chunk + (end - begin); chunk < last; ++chunk) {
        __m256i exact[kRows][kSome];
        for (auto& of_row : exact) {
            for (auto& sum : of_row) sum = _mm256_setzero_si256();
        }
        for (int i = 0; i < kVectors; ++i) {
            for (int t = 0; t < kSome; ++t) {
                for (int k = 0; k < kRows; ++k)
                    exact[k][t] = added(exact[k][t], chunk[k * kSlice].words[i], from[t]->words[i]);
            }
        }
        __m256 scale[kRows];
        for (int k = 0; k < kRows; ++k) scale[k] = chunk[k * kSlice].scale;
        for (int t = 0; t < kSome; ++t) {
            for (int k = 0; k < kRows; ++k) {
                __m256& acc = sums[t * kManyRows + k];
                acc = with_chunk<kZeros>(acc, exact[k][t], scale[k], chunk[k * kSlice].zeros, *from[t]);
            }
            ++from[t];
        }
        asm volatile("" ::: "memory");  // or GCC holds these sums, and not the exact ones, in registers
    }
}

template <int kSome, bool kZeros>
void add_words_of_rows(const WordTile& tile, int64_t rows, const Chunks* x, int64_t begin, int64_t end,
                       __m256* sums) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) add_words_of<2, kSome, kZeros>(tile + r, x, begin, end, sums + r);
    if (r < rows) add_words_of<1, kSome, kZeros>(tile + r, x, begin, end, sums + r);
}

template <bool kZeros, class Tables>
void many_tokens(const Weight& w, const Tables& tables, const Prepared& x, int64_t first, int64_t last,
                 float* const* y, uint8_t* scratch) {
    auto& tile = *reinterpret_cast<WordTile*>(scratch);
    auto* sums = reinterpret_cast<__m256*>(scratch + sizeof(WordTile));
    const auto* of_tokens = reinterpret_cast<const Chunks*>(x.rows);
    auto* scales = reinterpret_cast<float*>(sums + kManyRows * kManyTokens);
    const int64_t n = word_chunks(w);
    for (int64_t from = first; from < last; from += kManyRows) {
        const int64_t rows = last - from < kManyRows ? last - from : kManyRows;
        for (int64_t r = 0; r < rows; ++r) convert_scales(w, from + r, scales + r * scales_of_row(w));
        std::memset(sums, 0, static_cast<size_t>(kManyRows * x.tokens * 32));
        for (int64_t begin = 0; begin < n; begin += kSlice) {
            const int64_t end = begin + kSlice < n ? begin + kSlice : n;
            for (int64_t r = 0; r < rows; ++r)
                unpack_slice<kZeros>(w, tables, from + r, scales + r * scales_of_row(w), begin, end, tile[r]);
            const auto part = [&](auto some, int64_t t) {
                add_words_of_rows<decltype(some)::value, kZeros>(tile, rows, of_tokens + t, begin, end,
                                                                 sums + t * kManyRows);
            };
            int64_t t = 0;
            for (; t + kGroup <= x.tokens; t += kGroup) part(std::integral_constant<int, kGroup>(), t);
            if (x.tokens - t == 3) part(std::integral_constant<int, 3>(), t);
            if (x.tokens - t == 2) part(std::integral_constant<int, 2>(), t);
            if (x.tokens - t == 1) part(std::integral_constant<int, 1>(), t);
        }
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < x.tokens; ++t) {
                y[t][from + r] =
                    with_bias(w, from + r, sum_of_lanes(sums[t * kManyRows + r]), row_scale(w, from + r));
            }
        }
    }
}

inline bool takes_few(const Weight& w, int64_t tokens) {
    return tokens <= kFewTokens && !has_six_bits(w);
}

// Scratch: sums, and the scales of the rows.
inline int64_t word_scratch(const Weight& w, int64_t tokens) {
    const int64_t scales = scales_of_row(w) * 4;
    if (takes_few(w, tokens)) return kFewRows * (kGroup * 32 + scales);
    return static_cast<int64_t>(sizeof(WordTile)) + kManyRows * (kManyTokens * 32 + scales);
}

template <bool kZeros, class Tables>
void words_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
              uint8_t* scratch) {
    const Tables tables(w);
    if constexpr (Tables::kBits == 4) {
        if (takes_few(w, x.tokens))
            return few_tokens<kZeros>(w, tables, x, first, last, y, reinterpret_cast<float*>(scratch));
    }
    for (int64_t t = 0; t < x.tokens; t += kManyTokens) {
        const int64_t some = std::min(x.tokens - t, kManyTokens);
        many_tokens<kZeros>(w, tables, {x.rows + t, nullptr, some}, first, last, y + t, scratch);
    }
}

inline void rows_of_words(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                          uint8_t* scratch) {
    if (has_six_bits(w)) return words_of<false, SixBitTables>(w, x, first, last, y, scratch);
    w.zeros ? words_of<true, FourBitTables>(w, x, first, last, y, scratch)
            : words_of<false, FourBitTables>(w, x, first, last, y, scratch);
}

}  // namespace
}  // namespace hadron::avx2
