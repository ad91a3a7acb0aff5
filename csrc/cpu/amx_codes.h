// Codes of four and eight bits to vectors of 32 bfloat16, for tiles.
//
// Three ports do all of this, and a permute of words takes two of them: so bytes are looked up, and what is
// an affine function of bits is computed as one (GFNI). The order of columns within a tile is what costs
// least; activations are brought to the same one (`avx512_unpack.h`).
#pragma once

#include <array>

#include "amx_weights.h"

namespace hadron::avx512_amx {
namespace {

// A constant that compilers load once: they make those they know again and again, on a port that is short.
HADRON_LOCAL __m512i kept(__m512i constant) {
    asm("" : "+v"(constant));
    return constant;
}

// The low and the high bytes of the sixteen values of FP4 or INT4, in bfloat16.
struct Values {
    alignas(32) uint8_t bytes[2][16];

    Values() = default;
    Values(Element element, float scale) {
        for (uint32_t c = 0; c < 16; ++c) {
            const uint16_t value = to_bf16(code_value(element, c) * scale);
            bytes[0][c] = static_cast<uint8_t>(value), bytes[1][c] = static_cast<uint8_t>(value >> 8);
        }
    }
    HADRON_LOCAL __m256i load() const { return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)); }
};

// FP4 times each code of an E4M3 scale.
inline const Values* folded_values() {
    static const auto all = [] {
        std::array<Values, 256> of;
        for (uint32_t s = 0; s < 256; ++s) of[s] = Values(Element::e2m1, e4m3_value(s));
        return of;
    }();
    return all.data();
}

// FP4 and INT4 (Order::quads): a permute of bytes finds the low byte of each value in the first sixteen of a
// table and the high one in the next; the second sixteen columns of each 32 look from byte 32 on, where every
// sixteen have a scale.
template <Span kSpan>
struct TileNibbles {
    static constexpr int kBytes = 64;
    static constexpr bool kFolds = kSpan == Span::c16;
    const Values* folded_by = folded_values();
    __m512i table, shifts, place, nibble = kept(_mm512_set1_epi8(15));

    explicit TileNibbles(const Weight& w) : table(_mm512_castsi256_si512(Values(w.element, 1.0f).load())) {
        alignas(64) uint8_t shift[64], at[64];
        for (int b = 0; b < 64; ++b) {
            shift[b] = static_cast<uint8_t>(b / 16 * 16 + b % 8 / 2 * 4);
            at[b] = static_cast<uint8_t>(b % 2 * 16 + (kFolds ? b / 8 % 2 * 32 : 0));
        }
        shifts = _mm512_load_si512(shift), place = _mm512_load_si512(at);
    }
    HADRON_LOCAL __m512i look_up(const uint8_t* codes, __m512i in) const {
        const auto* sixteen_bytes = reinterpret_cast<const __m128i*>(codes);
        const __m512i each =
            _mm512_multishift_epi64_epi8(shifts, _mm512_broadcast_i32x4(_mm_loadu_si128(sixteen_bytes)));
        return _mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(each, nibble, place, 0xea),
                                       in);  // a & b | c
    }
    HADRON_LOCAL void operator()(const uint8_t* codes, __m512i* v) const {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) v[i] = look_up(codes + 16 * i, table);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        alignas(64) uint8_t whole[64];
        (*this)(filled_up_nibbles(codes, columns, whole), v);
    }
    // Row r times its scales.
    HADRON_LOCAL void folded(const uint8_t* codes, const uint8_t* scales, int r, __m512i* v) const {
        const auto by = [&](int i) __attribute__((always_inline)) {
            return folded_by[scales[code_place(i, r)]].load();
        };
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            v[i] = look_up(codes + 16 * i,
                           _mm512_inserti64x4(_mm512_castsi256_si512(by(2 * i)), by(2 * i + 1), 1));
        }
    }
};

// FP8 E4M3. The bits of a normal number in bfloat16 are an affine function of those of its code: the sign,
// the exponent with its first bit repeated three times inverted, the mantissa. What is not normal (zero,
// tiny, NaN) takes a table.
template <Order kOrder>
struct TileE4m3 {
    static constexpr int kBytes = 128;
    // One row of a matrix for each bit of a result, the highest last.
    const __m512i high = kept(_mm512_set1_epi64(0x1020404040404080)),
                  low = kept(_mm512_set1_epi64(0x0000000001020408));
    const __m512i magnitude = kept(_mm512_set1_epi8(127)), first = kept(_mm512_set1_epi8(8)),
                  count = kept(_mm512_set1_epi8(119));

    const avx512_bf16::UnpackE4m3<kOrder> any;

    explicit TileE4m3(const Weight& w) : any(w) {}
    HADRON_LOCAL void operator()(const uint8_t* codes, __m512i* v) const {
        const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
        if (_mm512_cmpge_epu8_mask(_mm512_max_epu8(distance(a), distance(b)), count) == 0) [[likely]] {
            normal(a, v), normal(b, v + 2);
        } else {
            any.unpack(a, v), any.unpack(b, v + 2);
        }
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const { any.tail(codes, columns, v); }

  private:
    // From the smallest normal number: less than `count`, if normal.
    HADRON_LOCAL __m512i distance(__m512i c) const {
        return _mm512_sub_epi8(_mm512_and_si512(c, magnitude), first);
    }
    HADRON_LOCAL void normal(__m512i in_order, __m512i* v) const {
        const __m512i c = avx512_bf16::arrange<kOrder>(in_order);
        avx512_bf16::join(_mm512_gf2p8affine_epi64_epi8(c, low, 0),
                          _mm512_gf2p8affine_epi64_epi8(c, high, 0x3c), v);  // four bits are inverted
    }
};

// INT8 by way of float32 (Order::pairs): its upper halves are the bfloat16.
struct TileInt8 {
    static constexpr int kBytes = 128;
    const __m512i upper = kept(_mm512_set1_epi32(static_cast<int>(0xffff0000)));

    explicit TileInt8(const Weight&) {}
    HADRON_LOCAL void operator()(const uint8_t* codes, __m512i* v) const {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i even = sixteen(codes + 32 * i), odd = sixteen(codes + 32 * i + 16);
            v[i] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, upper, 0xf8);  // a | b & c
        }
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        alignas(64) uint8_t whole[kChunk] = {};
        std::memcpy(whole, codes, static_cast<size_t>(columns));
        (*this)(whole, v);
    }

  private:
    HADRON_LOCAL static __m512i sixteen(const uint8_t* codes) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    }
};

}  // namespace
}  // namespace hadron::avx512_amx
