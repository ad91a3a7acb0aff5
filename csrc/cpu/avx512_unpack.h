// Codes of 128 columns to four vectors of 32 bfloat16, in the order that costs least, and their scales.
//
//   natural  vector i, word j: column 32 i + j                                    (BF16)
//   nibbles  vector i, word j: column 4 j + i; lane l of a dot holds 8 l .. 8 l + 7 (FP4, INT4)
//   bytes    half h of 64 columns, in 128-bit part p: vector 2 h holds 16 p .. 16 p + 7, vector 2 h + 1 the
//            next eight; lane l of a dot over half h holds columns of the sixteen 16 (l / 4) (FP8, INT8, FP6)
//   quads    vector i, word j: column 32 i + 16 (j / 4 % 2) + 4 (j / 8) + j % 4     (FP4, INT4)
//   pairs    vector i, word j: column 32 i + 16 (j % 2) + j / 2                     (INT8)
//
// The first and the last two keep 32 columns together, which dots of tiles (AMX) need where each 32 have a
// scale.
//
// A table of bfloat16 values is exact for every format: none has more than eight significant bits.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace hadron::avx512_bf16 {
namespace {

constexpr int kChunk = 128;

enum class Order { none = -1, natural = 0, nibbles = 1, bytes = 2, quads = 3, pairs = 4 };

// Where scales lie: after the sum, one a chunk, one a lane, or one a lane of each half.
enum class ScaleShape { other, after, chunk, lanes, halves };

inline Order unpack_order(const Weight& w) {
    if (!w.rounds()) return Order::none;
    switch (w.element) {
        case Element::bf16:
            return Order::natural;
        case Element::e2m1:
        case Element::int4:
            return Order::nibbles;
        case Element::e4m3:
        case Element::int8:
        case Element::e2m3:
        case Element::e3m2:
            return Order::bytes;
        default:
            return Order::none;
    }
}

inline ScaleShape scale_shape(const Weight& w) {
    const bool inside = w.granularity == Granularity::block || w.granularity == Granularity::group;
    if (!inside) return w.zeros ? ScaleShape::other : ScaleShape::after;
    if (w.element == Element::bf16) return ScaleShape::other;
    if (w.block_columns % kChunk == 0 && !w.zeros) return ScaleShape::chunk;
    if (unpack_order(w) == Order::nibbles)
        return w.block_columns % 8 == 0 ? ScaleShape::lanes : ScaleShape::other;
    return w.block_columns % 16 == 0 && !w.zeros ? ScaleShape::halves : ScaleShape::other;
}

// x [128] float32 to bfloat16 in that order.
inline void reorder(Order by, const float* x, uint16_t* out) {
    alignas(64) uint16_t b[kChunk];
    for (int i = 0; i < 4; ++i) {
        const __m512 low = _mm512_loadu_ps(x + 32 * i), high = _mm512_loadu_ps(x + 32 * i + 16);
        _mm512_store_si512(b + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    const __m512i* in = reinterpret_cast<const __m512i*>(b);
    auto* to = reinterpret_cast<__m512i*>(out);
    if (by == Order::natural) {
        for (int i = 0; i < 4; ++i) to[i] = in[i];
    } else if (by == Order::bytes) {
        const __m512i low = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0),
                      high = _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2);
        for (int h = 0; h < 2; ++h) {
            to[2 * h] = _mm512_permutex2var_epi64(in[2 * h], low, in[2 * h + 1]);
            to[2 * h + 1] = _mm512_permutex2var_epi64(in[2 * h], high, in[2 * h + 1]);
        }
    } else if (by != Order::nibbles) {
        alignas(64) uint16_t each[32];
        for (int j = 0; j < 32; ++j) {
            each[j] = static_cast<uint16_t>(by == Order::quads ? j / 4 % 2 * 16 + j / 8 * 4 + j % 4
                                                               : j % 2 * 16 + j / 2);
        }
        const __m512i index = _mm512_load_si512(each);
        for (int i = 0; i < 4; ++i) to[i] = _mm512_permutexvar_epi16(index, in[i]);
    } else {
        alignas(64) uint16_t each[32];
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 16; ++j) each[j] = static_cast<uint16_t>(4 * j + i), each[j + 16] = each[j];
            const __m512i index = _mm512_load_si512(each);  // sixteen words of two vectors
            const __m512i a = _mm512_permutex2var_epi16(in[0], index, in[1]);
            const __m512i c = _mm512_permutex2var_epi16(in[2], index, in[3]);
            to[i] = _mm512_mask_blend_epi32(0xff00, a, c);
        }
    }
}

// Sums of a chunk's activations, lane by lane as a dot adds them.
inline __m512 lane_sums(const uint16_t* x) {
    const __m512i one = _mm512_set1_epi16(0x3f80);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)_mm512_load_si512(x + 32 * i));
    return sum;
}

inline __mmask64 first_bytes(int64_t count) {
    return count >= 64 ? ~0ull : (1ull << count) - 1;
}

struct UnpackBf16 {
    static constexpr int kBytes = 256;
    explicit UnpackBf16(const Weight&) {}
    void operator()(const uint8_t* codes, __m512i* v) const {
        for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(codes + 64 * i);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        for (int i = 0; i < 4; ++i) {
            const int64_t left = columns * 2 - 64 * i;
            v[i] = left > 0 ? _mm512_maskz_loadu_epi8(first_bytes(left), codes + 64 * i)
                            : _mm512_setzero_si512();
        }
    }
};

struct UnpackNibbles {
    static constexpr int kBytes = 64;
    __m512i table;
    explicit UnpackNibbles(const Weight& w) {
        alignas(64) uint16_t values[32];
        for (uint32_t c = 0; c < 32; ++c) values[c] = to_bf16(code_value(w.element, c & 15u));
        table = _mm512_load_si512(values);  // twice: a permute of words looks at five bits, nibbles need four
    }
    void operator()(const uint8_t* codes, __m512i* v) const { unpack(_mm512_loadu_si512(codes), v); }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        unpack(_mm512_maskz_loadu_epi8(first_bytes((columns + 1) / 2), codes), v);
    }
    void unpack(__m512i c, __m512i* v) const {
        v[0] = _mm512_permutexvar_epi16(c, table);
        v[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(c, 4), table);
        v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(c, 8), table);
        v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(c, 12), table);
    }
};

// Bytes of the bfloat16 values of codes, low and high apart, joined by an interleave of bytes.
inline void join(__m512i low, __m512i high, __m512i* v) {
    v[0] = _mm512_unpacklo_epi8(low, high);
    v[1] = _mm512_unpackhi_epi8(low, high);
}

// 64 codes in the order of columns, as `join` takes them to make vectors of that order.
template <Order kOrder>
inline __m512i arrange(__m512i codes) {
    if constexpr (kOrder != Order::natural) return codes;
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), codes);
}

template <Order kOrder = Order::bytes>
struct UnpackE4m3 {
    static constexpr int kBytes = 128;
    __m512i low[2], high[2];
    explicit UnpackE4m3(const Weight&) {
        alignas(64) uint8_t l[128], h[128];
        for (uint32_t c = 0; c < 128; ++c) {
            const uint16_t value = to_bf16(e4m3_value(c));
            l[c] = static_cast<uint8_t>(value), h[c] = static_cast<uint8_t>(value >> 8);
        }
        for (int i = 0; i < 2; ++i)
            low[i] = _mm512_load_si512(l + 64 * i), high[i] = _mm512_load_si512(h + 64 * i);
    }
    void operator()(const uint8_t* codes, __m512i* v) const {
        unpack(_mm512_loadu_si512(codes), v);
        unpack(_mm512_loadu_si512(codes + 64), v + 2);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        unpack(_mm512_maskz_loadu_epi8(first_bytes(columns), codes), v);
        unpack(columns > 64 ? _mm512_maskz_loadu_epi8(first_bytes(columns - 64), codes + 64)
                            : _mm512_setzero_si512(),
               v + 2);
    }
    void unpack(__m512i in_order, __m512i* v) const {
        const __m512i c = arrange<kOrder>(in_order);
        const __m512i h = _mm512_permutex2var_epi8(high[0], c, high[1]);  // looks at seven bits
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
        join(_mm512_permutex2var_epi8(low[0], c, low[1]), _mm512_ternarylogic_epi32(h, c, sign, 0xf8), v);
    }
};

template <Order kOrder = Order::bytes>
struct UnpackInt8 {
    static constexpr int kBytes = 128;
    __m512i low[4], high[4];
    explicit UnpackInt8(const Weight&) {
        alignas(64) uint8_t l[256], h[256];
        for (uint32_t c = 0; c < 256; ++c) {
            const uint16_t value = to_bf16(code_value(Element::int8, c));
            l[c] = static_cast<uint8_t>(value), h[c] = static_cast<uint8_t>(value >> 8);
        }
        for (int i = 0; i < 4; ++i)
            low[i] = _mm512_load_si512(l + 64 * i), high[i] = _mm512_load_si512(h + 64 * i);
    }
    void operator()(const uint8_t* codes, __m512i* v) const {
        unpack(_mm512_loadu_si512(codes), v);
        unpack(_mm512_loadu_si512(codes + 64), v + 2);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        unpack(_mm512_maskz_loadu_epi8(first_bytes(columns), codes), v);
        unpack(columns > 64 ? _mm512_maskz_loadu_epi8(first_bytes(columns - 64), codes + 64)
                            : _mm512_setzero_si512(),
               v + 2);
    }
    void unpack(__m512i in_order, __m512i* v) const {
        const __m512i c = arrange<kOrder>(in_order);
        const __mmask64 negative = _mm512_movepi8_mask(c);
        const __m512i l = _mm512_mask_blend_epi8(negative, _mm512_permutex2var_epi8(low[0], c, low[1]),
                                                 _mm512_permutex2var_epi8(low[2], c, low[3]));
        const __m512i h = _mm512_mask_blend_epi8(negative, _mm512_permutex2var_epi8(high[0], c, high[1]),
                                                 _mm512_permutex2var_epi8(high[2], c, high[3]));
        join(l, h, v);
    }
};

// 48 bytes are 64 codes: every three bytes are spread to four, from which a shift picks each code.
template <Order kOrder = Order::bytes>
struct UnpackSixBits {
    static constexpr int kBytes = 96;
    __m512i low, high, spread;
    explicit UnpackSixBits(const Weight& w) {
        alignas(64) uint8_t l[64], h[64], s[64];
        for (uint32_t c = 0; c < 64; ++c) {
            const uint16_t value = to_bf16(code_value(w.element, c));
            l[c] = static_cast<uint8_t>(value), h[c] = static_cast<uint8_t>(value >> 8);
            s[c] = static_cast<uint8_t>(c / 8 * 6 + (c % 8 < 6 ? c % 8 : 5));  // six bytes into each eight
        }
        low = _mm512_load_si512(l), high = _mm512_load_si512(h);
        spread = arrange<kOrder>(_mm512_load_si512(s));
    }
    void operator()(const uint8_t* codes, __m512i* v) const {
        unpack(_mm512_maskz_loadu_epi8(first_bytes(48), codes), v);
        unpack(_mm512_maskz_loadu_epi8(first_bytes(48), codes + 48), v + 2);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        const int64_t bytes = (columns * 6 + 7) / 8;
        unpack(_mm512_maskz_loadu_epi8(first_bytes(bytes < 48 ? bytes : 48), codes), v);
        unpack(bytes > 48 ? _mm512_maskz_loadu_epi8(first_bytes(bytes - 48), codes + 48)
                          : _mm512_setzero_si512(),
               v + 2);
    }
    void unpack(__m512i c, __m512i* v) const {
        const __m512i shifts = _mm512_set1_epi64(0x2a241e18120c0600ll);  // 42, 36, 30, 24, 18, 12, 6, 0
        const __m512i each = _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(spread, c));
        join(_mm512_permutexvar_epi8(each, low), _mm512_permutexvar_epi8(each, high),
             v);  // looks at six bits
    }
};

}  // namespace
}  // namespace hadron::avx512_bf16

#include "avx512_scales.h"
