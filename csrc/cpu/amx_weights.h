// Weights as tiles: a unit is 16 rows by 128 columns, unpacked to four tiles of bfloat16, with its scales.
//
// Scales of FP4 go into the table that unpacks. E4M3 times an FP4 value has six bits: always a bfloat16. So
// has a power of two (E8M0), and there it changes no bit of a sum whether the scale comes before or after,
// unless a product leaves the range of float32: scales anywhere near that are kept apart (`folded` is false),
// and so are those of all other formats.
#pragma once

#include "amx_tiles.h"
#include "avx512_unpack.h"
#include "formats.h"

namespace hadron::avx512_amx {
namespace {

using avx512_bf16::first_bytes;
using avx512_bf16::kChunk;
using avx512_bf16::Order;

inline int64_t chunks(const Weight& w) {
    return (w.columns + kChunk - 1) / kChunk;
}

// Where sums of products end and scales come in: never (they follow the sum), or after so many columns.
// c16 is FP4 with E4M3 scales: in the weights.
enum class Span { other, all, chunk, c32, c16 };

constexpr int scales_of(Span span) {  // scales of a row in a chunk
    return span == Span::all ? 0 : span == Span::chunk ? 1 : span == Span::c32 ? 4 : 8;
}

inline Span span_of(const Weight& w) {
    if (w.zeros || !w.rounds()) return Span::other;
    if (w.granularity != Granularity::block && w.granularity != Granularity::group) return Span::all;
    if (w.block_columns % kChunk == 0) return Span::chunk;
    if (w.block_columns % 32 == 0) return Span::c32;
    const bool nvfp4 = w.element == Element::e2m1 && w.scale_type == ScaleType::e4m3 && w.block_columns == 16;
    return nvfp4 ? Span::c16 : Span::other;
}

inline Order order_of(const Weight& w) {
    if (w.element != Element::e2m1 && w.element != Element::int4) return Order::natural;
    return span_of(w) == Span::c16 ? Order::sixteens : Order::lanes;
}

struct Unit {
    alignas(64) uint8_t tiles[4][kTileBytes];
    // [scale of the chunk][row]; E8M0 that is folded: what is added to two words of bfloat16
    alignas(64) float scales[8][kTileRows];
    bool folded;  // into the tiles
};

// Scales of sixteen rows, chunk by chunk in order. kFold: into the weights, where that changes no bit.
template <Span kSpan, bool kFold = true>
class TileScales {
  public:
    void start(const Weight& w, int64_t first, int64_t end) {
        if constexpr (kSpan != Span::all) {
            w_ = &w;
            count_ = (w.columns + w.block_columns - 1) / w.block_columns;
            for (int64_t r = 0; r < kTileRows; ++r) {
                at_[r] = w.scale_row(first + r < end ? first + r : end - 1);
            }
            shared_ = at_[0] == at_[kTileRows - 1] && w.granularity == Granularity::block;
            by_byte_ = kSpan == Span::c16 ||
                       (kSpan == Span::c32 && w.scale_type == ScaleType::e8m0 && w.block_columns == 32);
        }
    }

    void chunk(int64_t c, Unit& unit) {
        constexpr int kCount = scales_of(kSpan);
        unit.folded = false;
        if constexpr (kCount > 1) {
            if (by_byte_) {
                const int64_t first = c * kCount % 16;
                if (first == 0) load(c * kCount);
                const bool exponents = kFold && kSpan == Span::c32 && usual_ && w_->element == Element::e2m1;
                unit.folded = kSpan == Span::c16 || exponents;
                for (int i = 0; i < kCount; ++i) {
                    const int64_t code = first + i;
                    const __m128i codes =
                        _mm_load_si128(reinterpret_cast<const __m128i*>(codes_[code % 4 * 4 + code / 4]));
                    if (exponents) {
                        const __m512i e =
                            _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(kBias));
                        _mm512_store_si512(unit.scales[i], _mm512_or_si512(_mm512_slli_epi32(e, 7),
                                                                           _mm512_slli_epi32(e, 23)));
                    } else {
                        _mm512_store_ps(unit.scales[i], values(codes));
                    }
                }
                return;
            }
        }
        for (int i = 0; i < kCount; ++i)
            one((c * kChunk + i * (kChunk / kCount)) / w_->block_columns, unit.scales[i]);
    }

    static constexpr int kBias = 64;  // the smallest code that is folded, taken off the table's exponents

  private:
    // Of sixteen codes, which in the usual case only have to be moved to the exponent.
    __m512 values(__m128i codes) const {
        if constexpr (kSpan == Span::c32) {
            if (!usual_) return avx512_bf16::e8m0_vector(codes);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23));
        } else {
            if (!usual_) return avx512_bf16::e4m3_vector(codes);
            const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 20);
            return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(120 << 23)));
        }
    }

    // One scale of each row. Those beyond the last multiply zeros.
    void one(int64_t index, float* out) const {
        if (index >= count_) return _mm512_store_ps(out, _mm512_setzero_ps());
        if (shared_) return _mm512_store_ps(out, _mm512_set1_ps(scale_value(*w_, at_[0] + index)));
        for (int r = 0; r < kTileRows; ++r) out[r] = scale_value(*w_, at_[r] + index);
    }

    // Codes base .. base + 15 of all rows, transposed: code i of the rows lies at [i % 4 * 4 + i / 4].
    void load(int64_t base) {
        const __mmask16 have =
            count_ - base >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count_ - base)) - 1);
        const __m512i by_code = _mm512_set_epi32(
            0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a, 0x39291909, 0x38281808,
            0x37271707, 0x36261606, 0x35251505, 0x34241404, 0x33231303, 0x32221202, 0x31211101, 0x30201000);
        const __m128i none = _mm_set1_epi8(120);  // harmless as a code of either type
        __m512i four[4];                          // of four rows: code by code
        // E8M0 that can be folded; normal and positive E4M3
        constexpr char kFirst = kSpan == Span::c32 ? kBias : 8, kCount = kSpan == Span::c32 ? 127 : 119;
        __mmask64 unusual = 0;
        for (int k = 0; k < 4; ++k) {
            const auto row = [&](int r) {
                return _mm_mask_loadu_epi8(none, have, w_->scales + at_[4 * k + r] + base);
            };
            __m512i rows = _mm512_castsi128_si512(row(0));
            rows = _mm512_inserti32x4(rows, row(1), 1);
            rows = _mm512_inserti32x4(rows, row(2), 2);
            rows = _mm512_inserti32x4(rows, row(3), 3);
            unusual |= _mm512_cmpge_epu8_mask(_mm512_sub_epi8(rows, _mm512_set1_epi8(kFirst)),
                                              _mm512_set1_epi8(kCount));
            four[k] = _mm512_permutexvar_epi8(by_code, rows);
        }
        usual_ = unusual == 0;
        const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]),
                      b = _mm512_unpackhi_epi32(four[0], four[1]),
                      c = _mm512_unpacklo_epi32(four[2], four[3]),
                      d = _mm512_unpackhi_epi32(four[2], four[3]);
        _mm512_store_si512(codes_[0], _mm512_unpacklo_epi64(a, c));
        _mm512_store_si512(codes_[4], _mm512_unpackhi_epi64(a, c));
        _mm512_store_si512(codes_[8], _mm512_unpacklo_epi64(b, d));
        _mm512_store_si512(codes_[12], _mm512_unpackhi_epi64(b, d));
    }

    alignas(64) uint8_t codes_[16][16] = {};
    const Weight* w_ = nullptr;
    int64_t count_ = 0;
    int64_t at_[kTileRows] = {};
    bool shared_ = false, by_byte_ = false, usual_ = false;
};

// A constant that compilers load once: they make those they know again and again, on a port that is short.
inline __m512i kept(__m512i constant) {
    asm("" : "+v"(constant));
    return constant;
}

// The nibbles of fewer columns than a chunk has, filled up with zeros.
inline const uint8_t* whole_nibbles(const uint8_t* codes, int64_t columns, uint8_t* to) {
    _mm512_store_si512(to, _mm512_maskz_loadu_epi8(first_bytes((columns + 1) / 2), codes));
    return to;
}

// Nibbles by 32 columns (Order::lanes), each by a permute of a table of words.
struct TileNibbles {
    static constexpr int kBytes = 64;
    static constexpr __mmask32 kNotZero = 0xfefefefe;  // codes 0 and 8 have no exponent to add to
    __m512i table, small, shifts;
    explicit TileNibbles(const Weight& w) : table(avx512_bf16::UnpackNibbles(w).table) {
        const __m512i bias = _mm512_set1_epi16((127 - TileScales<Span::c32>::kBias) << 7);
        small = _mm512_mask_sub_epi16(table, kNotZero, table, bias);
        shifts = _mm512_mullo_epi64(_mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0),
                                    _mm512_set1_epi64(0x0004000400040004));
    }
    HADRON_LOCAL __m512i words(const uint8_t* codes) const {  // 32 columns, each in the low bits of a word
        return _mm512_srlv_epi16(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), shifts);
    }
    HADRON_LOCAL void operator()(const uint8_t* codes, __m512i* v) const {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) v[i] = _mm512_permutexvar_epi16(words(codes + 16 * i), table);
    }
    void tail(const uint8_t* codes, int64_t columns, __m512i* v) const {
        alignas(64) uint8_t bytes[64];
        (*this)(whole_nibbles(codes, columns, bytes), v);
    }
    // The i-th 32 columns of row r times their scale.
    HADRON_LOCAL __m512i folded(const uint8_t* codes, const Unit& unit, int i, int r) const {
        const __m512i add = _mm512_castps_si512(_mm512_set1_ps(unit.scales[i][r]));
        return _mm512_permutexvar_epi16(words(codes), _mm512_mask_add_epi16(small, kNotZero, small, add));
    }
};

// FP4 in groups of sixteen (Order::sixteens): a scale times the sixteen values is a table of float32. Two
// groups are the lower and the upper halves of the words.
struct TileGroups {
    static constexpr int kBytes = 64;
    __m512 values;
    __m512i shifts, upper = kept(_mm512_set1_epi32(static_cast<int>(0xffff0000)));
    explicit TileGroups(const Weight& w) {
        alignas(64) float each[16];
        for (uint32_t c = 0; c < 16; ++c) each[c] = code_value(w.element, c);
        values = _mm512_load_ps(each);
        shifts = _mm512_mullo_epi32(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0),
                                    _mm512_set1_epi32(4));
    }
    HADRON_LOCAL __m512i group(const uint8_t* codes, float scale) const {
        const __m512 table = _mm512_mul_ps(values, _mm512_set1_ps(scale));
        const __m512i at = _mm512_srlv_epi32(_mm512_set1_epi64(load<int64_t>(codes)), shifts);
        return _mm512_castps_si512(_mm512_permutexvar_ps(at, table));  // looks at four bits
    }
    HADRON_LOCAL __m512i folded(const uint8_t* codes, const Unit& unit, int i, int r) const {
        const __m512i low = group(codes, unit.scales[2 * i][r]),
                      high = group(codes + 8, unit.scales[2 * i + 1][r]);
        return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, upper, 0xf8);  // a | b & c
    }
};

// Where the codes of sixteen rows [first, first + 16) lie. Rows from `end` on repeat the last.
struct Source {
    const uint8_t* codes;
    int64_t row_bytes, columns, last;

    Source(const Weight& w, int64_t first, int64_t end)
        : codes(w.codes + first * w.row_bytes),
          row_bytes(w.row_bytes),
          columns(w.columns),
          last((end - first < kTileRows ? end - first : kTileRows) - 1) {}
    HADRON_LOCAL const uint8_t* row(int64_t r) const { return codes + (r < last ? r : last) * row_bytes; }
};

// A unit is unpacked in this many parts, between which there are dots of another: the processor does both.
constexpr int kParts = 4;

// One part of columns [128 c, 128 c + 128) of sixteen rows, after their scales.
template <class Unpack>
HADRON_LOCAL void unpack_part(const Source& from, const Unpack& unpack, int64_t c, int part, Unit& unit) {
    constexpr int kRows = kTileRows / kParts;
    const int64_t left = from.columns - c * kChunk;
    const auto rows = [&](auto&& unpacked) {
#pragma GCC unroll 4
        for (int r = part * kRows; r < (part + 1) * kRows; ++r) {
            __m512i v[4];
            unpacked(from.row(r) + c * Unpack::kBytes, r, v);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) _mm512_store_si512(unit.tiles[i] + r * 64, v[i]);
        }
    };
    if constexpr (requires { unpack.folded(from.codes, unit, 0, 0); }) {
        if (unit.folded) {
            return rows([&](const uint8_t* codes, int r, __m512i* v) {
                alignas(64) uint8_t whole[64];
                if (left < kChunk) codes = whole_nibbles(codes, left, whole);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) v[i] = unpack.folded(codes + 16 * i, unit, i, r);
            });
        }
    }
    if constexpr (requires(__m512i* v) { unpack(from.codes, v); }) {
        rows([&](const uint8_t* codes, int, __m512i* v) {
            if (left >= kChunk) return unpack(codes, v);
            unpack.tail(codes, left, v);
        });
    }
}

}  // namespace
}  // namespace hadron::avx512_amx
