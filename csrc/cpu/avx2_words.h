// Codes of four or six bits in vectors of 256 bits: integers, straight from the packed codes.
//
// Activations become integers of sixteen bits, relative to the largest of 128 columns, a chunk: those of at
// least 1/128 of it lose nothing that bfloat16 has, the others at most 2^-16 of it. Codes are a multiple of
// their value that is an integer. The sums of a chunk are exact, each lane those of sixteen columns side by
// side, so that every lane has one scale and zero point. A chunk is always
//
//     acc = sum * (scale of the codes * scale of the activations) + acc
//
// in eight lanes that are added up in one fixed order at the end. How the exact sums come about is free: of
// four bits, one token multiplies bytes, by a shuffle of which codes become integers and a constant that
// keeps them positive, with the two bytes of activations; several multiply words, many such that are unpacked
// once.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "avx2_floats.h"

namespace hadron::avx2 {
namespace {

constexpr int64_t kChunk = 128;
constexpr int64_t kLaneColumns = 16;
constexpr int kVectors = 8;      // of a chunk's words
constexpr int kByteVectors = 4;  // of its bytes

inline bool has_six_bits(const Weight& w) {
    return w.element == Element::e2m3 || w.element == Element::e3m2;
}

inline bool takes_words(const Weight& w) {
    if (!w.rounds()) return false;
    if (w.element == Element::int4)
        return w.granularity != Granularity::block &&
               (w.granularity != Granularity::group || w.block_columns % kLaneColumns == 0);
    if (w.granularity != Granularity::group || w.zeros) return false;
    if (has_six_bits(w)) return w.scale_type == ScaleType::e8m0 && w.block_columns == 32;
    if (w.element != Element::e2m1) return false;
    return w.scale_type == ScaleType::e8m0 ? w.block_columns == 32
                                           : w.scale_type == ScaleType::e4m3 && w.block_columns == 16;
}

// How often the integer of a code is twice its value.
inline int doublings(Element element) {
    switch (element) {
        case Element::e2m1:
            return 1;
        case Element::e2m3:
            return 3;
        case Element::e3m2:
            return 4;
        default:
            return 0;
    }
}
inline int integer(Element element, uint32_t code) {
    return static_cast<int>(code_value(element, code) * static_cast<float>(1 << doublings(element)));
}

// What a code's byte is beside its integer: what makes that positive. INT4's is so as it is stored; six bits
// are unpacked to words.
inline int raised(Element element) {
    if (element == Element::int4) return 8;
    return element == Element::e2m1 ? 12 : 0;
}

inline int64_t word_chunks(const Weight& w) {
    return (w.columns + kChunk - 1) / kChunk;
}

// Of one token. constant: what takes off that codes are raised.
struct PreparedChunk {
    __m256i words[kVectors], constant;
    float scale;
};
// The same in bytes: a word is 256 times the one of `upper` less the one of `lower`. So they have all that
// bfloat16 holds, of which 127 * 256 + 128 is the most.
struct PreparedBytes {
    __m256i upper[kByteVectors], lower[kByteVectors];
};
static_assert(sizeof(PreparedChunk) % 64 == 0 && sizeof(PreparedBytes) % 64 == 0);

// Chunks, then their bytes.
inline int64_t word_bytes(const Weight& w) {
    return word_chunks(w) * static_cast<int64_t>(sizeof(PreparedChunk) + sizeof(PreparedBytes));
}
inline const PreparedBytes* bytes_behind(const Weight& w, const PreparedChunk* chunks) {
    return reinterpret_cast<const PreparedBytes*>(chunks + word_chunks(w));
}

// The first column of a lane: as the halves of two vectors fall that are shuffled to every other quarter.
inline int64_t lane_column(int64_t lane) {
    return (lane / 4 * 2 + lane % 2 + lane / 2 % 2 * 4) * kLaneColumns;
}

// Of two vectors of eight columns a lane, those of the first halves of sixteen columns, or of the second.
template <int kHalf>
HADRON_LOCAL __m256i halves_of(__m256i a, __m256i b) {
    constexpr int kQuarters = kHalf ? 0xdd : 0x88;
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), kQuarters));
}

// 64 integers in the order of columns to words in the order in which codes unpack: vector i, word j is column
// 4 j + i. Then the sums of eight.
inline void deal_words(const __m256i* fixed, __m256i* out) {
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
    for (int i = 0; i < 2; ++i) {
        out[i] = _mm256_permute2x128_si256(two[i], two[2 + i], 0x20);
        out[2 + i] = _mm256_permute2x128_si256(two[i], two[2 + i], 0x31);
    }
    __m256i sums[4];
    for (int m = 0; m < 4; ++m) sums[m] = _mm256_hadd_epi32(fixed[2 * m], fixed[2 * m + 1]);
    // of the lower halves of vectors 0 to 3 and of their upper halves, then 4 to 7
    const __m256i low = _mm256_hadd_epi32(sums[0], sums[1]), high = _mm256_hadd_epi32(sums[2], sums[3]);
    out[4] = _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                              _mm256_permute2x128_si256(low, high, 0x31));
}

// Bytes of every other word of two vectors, as codes of even or odd columns unpack.
inline __m256i bytes_of(__m256i even, __m256i odd) {
    return _mm256_or_si256(_mm256_and_si256(even, _mm256_set1_epi16(255)), _mm256_slli_epi16(odd, 8));
}

// A chunk of integers.
inline void store_chunk(const __m256i* fixed, int raised, PreparedChunk* to, PreparedBytes* bytes) {
    __m256i a[5], b[5], upper[kVectors], lower[kVectors];
    deal_words(fixed, a), deal_words(fixed + 8, b);
    for (int i = 0; i < 4; ++i) {
        to->words[i] = halves_of<0>(a[i], b[i]);
        to->words[4 + i] = halves_of<1>(a[i], b[i]);
    }
    for (int i = 0; i < kVectors; ++i) {
        upper[i] = _mm256_srai_epi16(_mm256_add_epi16(to->words[i], _mm256_set1_epi16(127)), 8);
        lower[i] = _mm256_sub_epi16(_mm256_slli_epi16(upper[i], 8), to->words[i]);
    }
    for (int i = 0; i < kByteVectors; ++i) {
        const int first = i / 2 * 4 + i % 2;
        bytes->upper[i] = bytes_of(upper[first], upper[first + 2]);
        bytes->lower[i] = bytes_of(lower[first], lower[first + 2]);
    }
    const __m256i sums = _mm256_add_epi32(halves_of<0>(a[4], b[4]), halves_of<1>(a[4], b[4]));
    to->constant = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-raised));
}

inline uint32_t largest_of(__m256i v) {
    alignas(32) uint32_t each[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(each), v);
    for (int i = 1; i < 8; ++i) each[0] = each[i] > each[0] ? each[i] : each[0];
    return each[0];
}

inline void prepare_words(const Weight& w, const float* x, uint8_t* prepared) {
    auto* chunks = reinterpret_cast<PreparedChunk*>(prepared);
    auto* bytes = const_cast<PreparedBytes*>(bytes_behind(w, chunks));
    const auto doubled = static_cast<uint32_t>(doublings(w.element)), least = 15 + doubled;
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
        const uint32_t exponent = std::max(largest >> 23, least);  // integers of at most 32767
        const __m256 inverse = _mm256_set1_ps(finite ? from_bits((268 - exponent) << 23) : 0.0f);
        chunks[c].scale = finite ? from_bits((exponent - 14 - doubled) << 23) : from_bits(0x7fc00000u);
        for (int i = 0; i < 16; ++i) {
            v[i] = finite ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(v[i]), inverse))
                          : _mm256_setzero_si256();
        }
        store_chunk(v, raised(w.element), chunks + c, bytes + c);
    }
}

// Whether some of these codes of E8M0 are none of a normal number.
inline bool has_odd_powers(const uint8_t* codes, int64_t count) {
    const __m256i one = _mm256_set1_epi8(1);
    for (int64_t g = 0; g < count; g += 32) {
        uint8_t last[32] = {};
        const uint8_t* at = codes + g;
        if (g + 32 > count) {
            std::memset(last, 127, sizeof last);
            at = static_cast<uint8_t*>(std::memcpy(last, at, static_cast<size_t>(count - g)));
        }
        const __m256i next = _mm256_add_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), one);
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(next, one), next)) != 0) return true;
    }
    return false;
}

// Eight scales of groups. odd: whether there may be such that are none of a normal number.
inline __m256 e8m0_scales(const uint8_t* codes, bool odd) {
    const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    __m256i bits = _mm256_slli_epi32(c, 23);
    if (odd) {
        const __m256i zero = _mm256_cmpeq_epi32(c, _mm256_setzero_si256()),
                      nan = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(255));
        bits = _mm256_or_si256(bits, _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
        bits = _mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000)));
    }
    return _mm256_castsi256_ps(bits);
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

// Whether a chunk has whole groups: their scales are dealt to lanes as they are used. Else (INT4) they stand
// once for each lane.
inline bool has_whole_groups(const Weight& w) {
    return w.granularity == Granularity::group && kChunk % w.block_columns == 0;
}

// Numbers of a row's scales: of whole chunks, with room for one load more; behind the last they multiply
// zeros. Behind them a share of each zero point, if there are any: as the constant of codes has so many times
// the activations.
inline int64_t scales_of_row(const Weight& w) {
    const int64_t columns = has_whole_groups(w) ? w.block_columns : kLaneColumns;
    return (word_chunks(w) * kChunk / columns + 15) / 8 * 8 * (w.zeros ? 2 : 1);
}

inline float share_of_zero(const Weight& w, int64_t row, int64_t group) {
    return static_cast<float>(w.zero(row, group)) / static_cast<float>(raised(w.element));
}

// Scales of lanes: of groups that do not divide a chunk, or of none.
inline void deal_scales(const Weight& w, int64_t row, float* to) {
    const int64_t pieces = word_chunks(w) * 8;
    float* zeros = to + scales_of_row(w) / 2;
    if (w.granularity != Granularity::group) {
        std::fill(to, to + pieces, 1.0f);
        if (w.zeros) std::fill(zeros, zeros + pieces, share_of_zero(w, row, 0));
        return;
    }
    for (int64_t group = 0, piece = 0; piece < pieces; ++group) {  // sixteen columns each, in order
        const bool inside = group * w.block_columns < w.columns;
        const float scale = inside ? scale_value(w, w.scale_row(row) + group) : 0.0f;
        const float zero = inside && w.zeros ? share_of_zero(w, row, group) : 0.0f;
        const int64_t end = std::min(pieces, (group + 1) * w.block_columns / kLaneColumns);
        for (; piece < end; ++piece) {
            const int64_t lane = piece / 8 * 8 + lane_column(piece % 8) / kLaneColumns;  // either way
            to[lane] = scale;
            if (w.zeros) zeros[lane] = zero;
        }
    }
}

inline int64_t scale_bytes(ScaleType type) {
    if (type == ScaleType::f32) return 4;
    return type == ScaleType::f16 || type == ScaleType::bf16 ? 2 : 1;
}

// odd: see `e8m0_scales`.
inline __m256 eight_scales(ScaleType type, const uint8_t* at, bool odd) {
    const auto words = [&] { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
    switch (type) {
        case ScaleType::e8m0:
            return e8m0_scales(at, odd);
        case ScaleType::e4m3:
            return e4m3_scales(at);
        case ScaleType::bf16:
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words()), 16));
        case ScaleType::f16:
            return _mm256_cvtph_ps(words());
        default:
            return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
    }
}

inline void convert_scales(const Weight& w, int64_t row, float* to) {
    if (!has_whole_groups(w)) return deal_scales(w, row, to);
    const int64_t size = scale_bytes(w.scale_type), all = scales_of_row(w) / (w.zeros ? 2 : 1);
    const int64_t count = (w.columns + w.block_columns - 1) / w.block_columns;
    const uint8_t* from = w.scales + w.scale_row(row) * size;
    const bool odd = w.scale_type == ScaleType::e8m0 && has_odd_powers(from, count);
    for (int64_t g = 0; g < all; g += 8) {
        uint8_t last[32] = {};
        const uint8_t* at = from + g * size;
        if (g + 8 > count) {
            if (g < count) std::memcpy(last, at, static_cast<size_t>((count - g) * size));
            at = last;
        }
        _mm256_storeu_ps(to + g, eight_scales(w.scale_type, at, odd));
    }
    if (w.zeros) {
        for (int64_t g = 0; g < all; ++g) to[all + g] = g < count ? share_of_zero(w, row, g) : 0.0f;
    }
}

// Deals the scales of a chunk to its lanes.
struct LaneScales {
    __m256i deal;
    int64_t groups;  // of a chunk

    explicit LaneScales(const Weight& w) : groups(has_whole_groups(w) ? kChunk / w.block_columns : 8) {
        alignas(32) int32_t of_lane[8];
        for (int lane = 0; lane < 8; ++lane) {
            const int64_t group = has_whole_groups(w) ? lane_column(lane) / w.block_columns : lane;
            of_lane[lane] = static_cast<int32_t>(group);
        }
        deal = _mm256_load_si256(reinterpret_cast<const __m256i*>(of_lane));
    }
    HADRON_LOCAL __m256 scales(const float* from) const {
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), deal);
    }
};

// What turns a chunk's codes of four bits into bytes and words.
struct FourBitTables : LaneScales {
    static constexpr int kBits = 4;
    __m256i values, low;
    int raised;

    explicit FourBitTables(const Weight& w)
        : LaneScales(w), low(_mm256_set1_epi8(15)), raised(avx2::raised(w.element)) {
        alignas(32) uint8_t bytes[32];
        for (uint32_t code = 0; code < 32; ++code)
            bytes[code] = static_cast<uint8_t>(raised + integer(w.element, code & 15u));
        values = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
    }
    // The bytes of even and odd columns, of the first or of the second eight columns of every lane.
    template <int kHalf>
    HADRON_LOCAL void unpack(const uint8_t* codes, __m256i* bytes) const {
        const auto* from = reinterpret_cast<const __m256i*>(codes);
        const __m256i v = halves_of<kHalf>(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
        bytes[0] = _mm256_shuffle_epi8(values, _mm256_and_si256(v, low));
        bytes[1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    }
    // The words of those, as PreparedChunk has them.
    template <int kHalf>
    HADRON_LOCAL void unpack_words(const uint8_t* codes, __m256i* words) const {
        __m256i bytes[2];
        unpack<kHalf>(codes, bytes);
        for (int i = 0; i < 2; ++i) {
            words[i] = _mm256_and_si256(bytes[i], _mm256_set1_epi16(255));
            words[2 + i] = _mm256_srli_epi16(bytes[i], 8);
        }
    }
    // The words of the integers themselves.
    HADRON_LOCAL void unpack_chunk(const uint8_t* codes, __m256i* words) const {
        unpack_words<0>(codes, words);
        unpack_words<1>(codes, words + 4);
        for (int i = 0; i < kVectors; ++i)
            words[i] = _mm256_sub_epi16(words[i], _mm256_set1_epi16(static_cast<int16_t>(raised)));
    }
};

// The codes of a chunk, padded in `last` where the row ends inside or less than sixteen bytes behind.
template <int kBits>
struct ChunkCodes {
    static constexpr int64_t kBytes = kChunk * kBits / 8;
    uint8_t last[kBytes + 16];

    HADRON_LOCAL const uint8_t* operator()(const Weight& w, const uint8_t* row, int64_t chunk) {
        constexpr int64_t kBehind = kBits == 6 ? 32 : 0;  // columns that loads of sixteen bytes may reach
        const uint8_t* at = row + chunk * kBytes;
        if ((chunk + 1) * kChunk + kBehind <= w.columns) return at;
        const int64_t columns = std::min(kChunk, w.columns - chunk * kChunk);
        std::memset(last, 0, sizeof last);
        std::memcpy(last, at, static_cast<size_t>((columns * kBits + 7) / 8));
        return last;
    }
};

}  // namespace
}  // namespace hadron::avx2
