// Weights as tiles: a unit is 16 rows by 128 columns, unpacked to four tiles of bfloat16, with its scales.
//
// Scales of NVFP4 are in the table that unpacks: there is one of sixteen products for each code of a scale.
// E4M3 times an FP4 value has six bits: always a bfloat16. Those of all other formats are kept apart.
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
    switch (w.element) {
        case Element::e2m1:
        case Element::int4:
            return Order::quads;
        case Element::int8:
            return Order::pairs;
        case Element::e4m3:
            return span_of(w) == Span::c32 ? Order::natural : Order::bytes;
        default:
            return Order::natural;
    }
}

// Where a row's code of the chunk's i-th scale lies.
constexpr int code_place(int i, int row) {
    return (i % 4 * 4 + i / 4) * kTileRows + row;
}

struct Unit {
    alignas(64) uint8_t tiles[4][kTileBytes];
    alignas(64) float scales[4][kTileRows];  // [scale of the chunk][row]
    const uint8_t* codes;                    // of scales that are bytes: `code_place`
};

// Scales of sixteen rows, chunk by chunk in order.
template <Span kSpan>
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

    HADRON_LOCAL void chunk(int64_t c, Unit& unit) {
        constexpr int kCount = scales_of(kSpan);
        if constexpr (kCount > 1) {
            if (by_byte_) unit.codes = codes(c);
        }
        if constexpr (kCount > 0 && kSpan != Span::c16) convert(c, unit);
    }

    // Of a chunk's scales that are bytes: `code_place`.
    HADRON_LOCAL const uint8_t* codes(int64_t c) {
        const int64_t first = c * scales_of(kSpan) % 16;
        if (first == 0) load(c * scales_of(kSpan));
        return codes_[first / 4];
    }

  private:
    // Of sixteen E8M0 codes, which in the usual case only have to be moved to the exponent.
    __m512 values(__m128i codes) const {
        if (!usual_) return avx512_bf16::e8m0_vector(codes);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23));
    }

    __attribute__((noinline)) void convert(int64_t c, Unit& unit) const {
        constexpr int kCount = scales_of(kSpan);
        for (int i = 0; i < kCount; ++i) {
            if (by_byte_) {
                const auto* codes = reinterpret_cast<const __m128i*>(unit.codes + code_place(i, 0));
                _mm512_store_ps(unit.scales[i], values(_mm_load_si128(codes)));
            } else {
                one((c * kChunk + i * (kChunk / kCount)) / w_->block_columns, unit.scales[i]);
            }
        }
    }

    // One scale of each row. Those beyond the last multiply zeros.
    void one(int64_t index, float* out) const {
        if (index >= count_) return _mm512_store_ps(out, _mm512_setzero_ps());
        if (shared_) return _mm512_store_ps(out, _mm512_set1_ps(scale_value(*w_, at_[0] + index)));
        for (int r = 0; r < kTileRows; ++r) out[r] = scale_value(*w_, at_[r] + index);
    }

    // Codes base .. base + 15 of all rows, transposed: `code_place`.
    __attribute__((noinline)) void load(int64_t base) {
        const __mmask16 have =
            count_ - base >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count_ - base)) - 1);
        const __m512i by_code = _mm512_set_epi32(
            0x3f2f1f0f, 0x3e2e1e0e, 0x3d2d1d0d, 0x3c2c1c0c, 0x3b2b1b0b, 0x3a2a1a0a, 0x39291909, 0x38281808,
            0x37271707, 0x36261606, 0x35251505, 0x34241404, 0x33231303, 0x32221202, 0x31211101, 0x30201000);
        const __m128i none = _mm_set1_epi8(120);  // harmless as a code of either type
        __m512i four[4];                          // of four rows: code by code
        if (base % 64 == 0) {                     // a line of each of the sixteen rows that follow
            for (int r = 0; r < kTileRows; ++r) {
                const uint8_t* ahead = w_->scales + at_[r] + base + kTileRows * w_->scale_stride;
                _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
            }
        }
        __mmask64 unusual = 0;
        for (int k = 0; k < 4; ++k) {
            const auto row = [&](int r) {
                return _mm_mask_loadu_epi8(none, have, w_->scales + at_[4 * k + r] + base);
            };
            __m512i rows = _mm512_castsi128_si512(row(0));
            rows = _mm512_inserti32x4(rows, row(1), 1);
            rows = _mm512_inserti32x4(rows, row(2), 2);
            rows = _mm512_inserti32x4(rows, row(3), 3);
            // E8M0 of 64 to 190: far enough from both ends
            unusual |=
                _mm512_cmpge_epu8_mask(_mm512_sub_epi8(rows, _mm512_set1_epi8(64)), _mm512_set1_epi8(127));
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

// Where the codes of sixteen rows [first, first + 16) lie. Rows from `end` on repeat the last.
struct Source {
    const uint8_t* rows[kTileRows];
    int64_t columns;
    bool whole;  // sixteen rows are there

    Source(const Weight& w, int64_t first, int64_t end)
        : columns(w.columns), whole(end - first >= kTileRows) {
        for (int64_t r = 0; r < kTileRows; ++r)
            rows[r] = w.codes + (first + r < end ? first + r : end - 1) * w.row_bytes;
    }
};

// Nibbles of fewer columns than a chunk has, with zeros after them.
inline const uint8_t* filled_up_nibbles(const uint8_t* codes, int64_t columns, uint8_t* to) {
    _mm512_store_si512(to, _mm512_maskz_loadu_epi8(first_bytes((columns + 1) / 2), codes));
    return to;
}

// A unit is unpacked in this many parts, between which there are dots of another: the processor does both.
constexpr int kParts = 4;

// One part of columns [128 c, 128 c + 128) of sixteen rows, after their scales. Everything is inlined, or
// constants would be loaded again for each row.
template <class Unpack>
HADRON_LOCAL void unpack_part(const Source& from, const Unpack& unpack, int64_t c, int part, Unit& unit) {
    constexpr int kRows = kTileRows / kParts;
    const int64_t left = from.columns - c * kChunk;
    uint8_t* to = unit.tiles[0] + part * kRows * 64;
    const auto each_row = [&](auto&& unpacked) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            __m512i v[4];
            unpacked(from.rows[part * kRows + r] + c * Unpack::kBytes, part * kRows + r, v);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) _mm512_store_si512(to + i * kTileBytes + r * 64, v[i]);
        }
    };
    alignas(64) uint8_t filled_up[64];
    if constexpr (requires { requires Unpack::kFolds; }) {
        if (left >= kChunk) {
            return each_row([&](const uint8_t* codes, int r, __m512i* v)
                                __attribute__((always_inline)) { unpack.folded(codes, unit.codes, r, v); });
        }
        return each_row([&](const uint8_t* codes, int r, __m512i* v) __attribute__((always_inline)) {
            unpack.folded(filled_up_nibbles(codes, left, filled_up), unit.codes, r, v);
        });
    } else {
        if (left >= kChunk) {
            each_row([&](const uint8_t* codes, int, __m512i* v)
                         __attribute__((always_inline)) { unpack(codes, v); });
        } else {
            each_row([&](const uint8_t* codes, int, __m512i* v)
                         __attribute__((always_inline)) { unpack.tail(codes, left, v); });
        }
    }
}

}  // namespace
}  // namespace hadron::avx512_amx
