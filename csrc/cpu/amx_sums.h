// Activations packed into panels of sixteen tokens, and sums of units of weights times such panels.
#pragma once

#include "amx_weights.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kPanel = 16;                     // tokens of a tile
constexpr int64_t kMostTokens = 512;               // that are multiplied at a time: they stay in L2
constexpr int64_t kPartialBytes = 4 * kTileBytes;  // of four dots, on their way to be scaled

// Panels of one call: [chunk][panel][32 columns][pair of them][token].
struct Panels {
    const uint8_t* data;
    int64_t count, width;

    static Panels of(int64_t tokens) {
        const int64_t some = tokens < kMostTokens ? tokens : kMostTokens,
                      count = (some + kPanel - 1) / kPanel;
        return {nullptr, count, count == 1 ? some : kPanel};
    }
    int64_t block() const { return width * 64; }  // bytes of 32 columns of a panel
    int64_t stride() const { return count * 4 * block(); }
    int64_t bytes(int64_t chunks) const { return chunks * stride(); }
    const uint8_t* chunk(int64_t c, int64_t panel) const { return data + c * stride() + panel * 4 * block(); }

    // Chunk c of rows of up to kMostTokens tokens.
    void pack(const uint8_t* const* rows, int64_t tokens, int64_t c, uint8_t* packed) const {
        uint8_t* to = packed + c * stride();
        const auto lanes = static_cast<__mmask16>((1u << width) - 1);
        for (int64_t p = 0; p < count; ++p) {
            for (int i = 0; i < 4; ++i, to += block()) {
                __m512i v[16];
                for (int64_t t = 0; t < kPanel; ++t) {
                    const int64_t token = p * kPanel + t;
                    v[t] = token < tokens ? _mm512_load_si512(rows[token] + c * kChunk * 2 + i * 64)
                                          : _mm512_setzero_si512();
                }
                transpose(v);
                for (int k = 0; k < 16; ++k) _mm512_mask_storeu_epi32(to + k * width * 4, lanes, v[k]);
            }
        }
    }
};

// sums += dots of a chunk, in tiles. x: the chunk of a panel, `block` bytes for each 32 columns.
template <int kSum>
inline void dot_chunk(const Unit& unit, const uint8_t* x, int64_t block) {
    load_tile<4>(unit.tiles[0], 64), load_tile<6>(x, block / 16), dot_tiles<kSum, 4, 6>();
    load_tile<5>(unit.tiles[1], 64), load_tile<7>(x + block, block / 16), dot_tiles<kSum, 5, 7>();
    load_tile<4>(unit.tiles[2], 64), load_tile<6>(x + 2 * block, block / 16), dot_tiles<kSum, 4, 6>();
    load_tile<5>(unit.tiles[3], 64), load_tile<7>(x + 3 * block, block / 16), dot_tiles<kSum, 5, 7>();
}

// The same for a register that is known when running, 0 to 3.
HADRON_LOCAL void dot_chunk_into(int64_t sum, const Unit& unit, const uint8_t* x, int64_t block) {
    switch (sum) {
        case 0:
            return dot_chunk<0>(unit, x, block);
        case 1:
            return dot_chunk<1>(unit, x, block);
        case 2:
            return dot_chunk<2>(unit, x, block);
        default:
            return dot_chunk<3>(unit, x, block);
    }
}

// Two groups of rows times several chunks of a panel, where no scale comes in.
inline void dot_slice(const Unit* units, int64_t chunks, const uint8_t* x, int64_t stride, int64_t block,
                      float* sums, float* sums2) {
    load_tile<0>(sums, 64), load_tile<1>(sums2, 64);
    for (int64_t c = 0; c < chunks; ++c) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            load_tile<6>(x + c * stride + i * block, block / 16);
            load_tile<4>(units[c].tiles[i], 64), dot_tiles<0, 4, 6>();
            load_tile<5>(units[chunks + c].tiles[i], 64), dot_tiles<1, 5, 6>();
        }
    }
    store_tile<0>(sums, 64), store_tile<1>(sums2, 64);
}

// The kDot-th dot of a chunk, over as many columns as one scale covers.
template <Span kSpan, int kSum, int kDot>
inline void dot_group(const Unit& unit, const uint8_t* x, int64_t block) {
    constexpr int kParts = scales_of(kSpan) / 4, kWeights = 4 + kDot % 2, kTokens = 6 + kDot % 2;
    load_tile<kWeights>(unit.tiles[kDot / kParts] + kDot % kParts * 32, 64);
    load_tile<kTokens>(x + kDot * block / kParts, block / 16);
    dot_tiles<kSum, kWeights, kTokens>();
}

// acc += partial * scale for one scale of each of sixteen rows.
HADRON_LOCAL void add_scaled(__m512* acc, const uint8_t* partial, const float* scales) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
        acc[r] = _mm512_fmadd_ps(_mm512_load_ps(partial + r * 64), _mm512_set1_ps(scales[r]), acc[r]);
}

// Four scales' dots from zero, then added.
template <Span kSpan, int kFirst>
inline void dot_four(const Unit& unit, const uint8_t* x, int64_t block, uint8_t* partial, __m512* acc) {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    dot_group<kSpan, 0, kFirst>(unit, x, block), dot_group<kSpan, 1, kFirst + 1>(unit, x, block);
    dot_group<kSpan, 2, kFirst + 2>(unit, x, block), dot_group<kSpan, 3, kFirst + 3>(unit, x, block);
    store_tile<0>(partial, 64), store_tile<1>(partial + kTileBytes, 64);
    store_tile<2>(partial + 2 * kTileBytes, 64), store_tile<3>(partial + 3 * kTileBytes, 64);
    for (int i = 0; i < 4; ++i) add_scaled(acc, partial + i * kTileBytes, unit.scales[kFirst + i]);
}

// sums += one unit times one panel; sums: of sixteen rows by sixteen tokens.
template <Span kSpan>
inline void dot_unit(const Unit& unit, const uint8_t* x, int64_t block, uint8_t* partial, float* sums) {
    if (kSpan == Span::all || (kSpan == Span::c32 && unit.folded)) {
        load_tile<0>(sums, 64);
        dot_chunk<0>(unit, x, block);
        return store_tile<0>(sums, 64);
    }
    if constexpr (kSpan != Span::all) {
        __m512 acc[kTileRows];
        for (int r = 0; r < kTileRows; ++r) acc[r] = _mm512_load_ps(sums + r * 16);
        if constexpr (kSpan == Span::chunk) {
            clear_tile<0>();
            dot_chunk<0>(unit, x, block);
            store_tile<0>(partial, 64);
            add_scaled(acc, partial, unit.scales[0]);
        } else {
            dot_four<kSpan, 0>(unit, x, block, partial, acc);
            if constexpr (kSpan == Span::c16) dot_four<kSpan, 4>(unit, x, block, partial, acc);
        }
        for (int r = 0; r < kTileRows; ++r) _mm512_store_ps(sums + r * 16, acc[r]);
    }
}

// Finished sums of sixteen rows go to the results of `tokens` tokens.
inline void finish(const Weight& w, int64_t row, int64_t end, const float* sums, int64_t tokens, bool one,
                   float* const* y) {
    alignas(64) float scale[kTileRows], bias[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) {
        const bool inside = row + r < end;
        scale[r] = inside ? row_scale(w, row + r) : 0.0f;
        bias[r] = inside && w.bias ? w.bias[row + r] : 0.0f;
    }
    const __m512 by = _mm512_load_ps(scale), plus = _mm512_load_ps(bias);
    const auto rows = static_cast<__mmask16>((1u << (end - row < kTileRows ? end - row : kTileRows)) - 1);
    __m512i v[kTileRows];
    for (int i = 0; i < (one ? 1 : kTileRows); ++i) v[i] = _mm512_load_si512(sums + 16 * i);
    if (!one) transpose(v);
    for (int64_t t = 0; t < tokens; ++t) {
        _mm512_mask_storeu_ps(y[t] + row, rows, _mm512_fmadd_ps(_mm512_castsi512_ps(v[t]), by, plus));
    }
}

}  // namespace
}  // namespace hadron::avx512_amx
