// Activations packed into panels of sixteen tokens, and sums of units of weights times such panels.
#pragma once

#include "amx_weights.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kPanel = 16;                     // tokens of a tile
constexpr int64_t kPackedBytes = 1 << 20;          // of panels that are multiplied at a time: they stay in L2
constexpr int64_t kManyGroups = 32;                // of sixteen rows, whose sums stay in L2
constexpr int64_t kAhead = 1024;                   // bytes of a row that are brought to L2 before their turn
constexpr int64_t kPartialBytes = 4 * kTileBytes;  // of four dots, on their way to be scaled

// Tokens of so many chunks that are multiplied at a time: fewer would read weights more often than it pays.
inline int64_t most_tokens(int64_t chunks) {
    const int64_t pairs = kPackedBytes / (2 * chunks * 4 * kTileBytes);
    return 2 * kPanel * (pairs > 4 ? pairs : 4);
}

// Chunks that so many panels are multiplied in at a time; scales are read for no fewer.
inline int64_t most_chunks(int64_t panels) {
    const int64_t some = kPackedBytes / (panels * 4 * kTileBytes) / 4 * 4;
    return some > 4 ? some : 4;
}

// Panels of one call: [chunk][panel][32 columns][pair of them][token].
struct Panels {
    const uint8_t* data;
    int64_t count, width;

    // tokens: up to `most_tokens`.
    static Panels of(int64_t tokens) {
        const int64_t count = (tokens + kPanel - 1) / kPanel;
        return {nullptr, count, count == 1 ? tokens : kPanel};
    }
    int64_t block() const { return width * 64; }  // bytes of 32 columns of a panel
    // Bytes from one row's sums to the next; one token's lie together.
    int64_t sums_stride() const { return width == 1 ? 4 : 64; }
    int64_t stride() const { return count * 4 * block(); }
    int64_t bytes(int64_t chunks) const { return chunks * stride(); }
    const uint8_t* chunk(int64_t c, int64_t panel) const { return data + c * stride() + panel * 4 * block(); }

    // Chunk c of the rows of all tokens.
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

// What is done between dots: part i of kParts.
struct Nothing {
    HADRON_LOCAL void operator()(int) const {}
};

// Register kSum += dots of a chunk. Tiles of weights: `tile` bytes apart, their rows `stride` bytes apart;
// x: the chunk of a panel, `block` bytes for each 32 columns.
template <int kSum, class Between = Nothing>
HADRON_LOCAL void dot_chunk(const uint8_t* weights, int64_t tile, int64_t stride, const uint8_t* x,
                            int64_t block, const Between& between = {}) {
    load_tile<4>(weights, stride), load_tile<6>(x, block / 16), dot_tiles<kSum, 4, 6>();
    between(0);
    load_tile<5>(weights + tile, stride), load_tile<7>(x + block, block / 16), dot_tiles<kSum, 5, 7>();
    between(1);
    load_tile<4>(weights + 2 * tile, stride), load_tile<6>(x + 2 * block, block / 16),
        dot_tiles<kSum, 4, 6>();
    between(2);
    load_tile<5>(weights + 3 * tile, stride), load_tile<7>(x + 3 * block, block / 16),
        dot_tiles<kSum, 5, 7>();
    between(3);
}

// The first store of a tile after some 2,000 cycles without one takes 1,000 more (measured on Sapphire
// Rapids). So where there is none for longer, what is in a register nobody needs is stored now and then.
HADRON_LOCAL void keep_stores_awake(uint8_t* unused) {
    store_tile<3>(unused, 64);
}

// Registers 0 (and 2) += a chunk of two panels (or one) times a unit, 1 (and 3) += times another.
template <int kPanels>
HADRON_LOCAL void dot_four(const Unit& one, const Unit& other, const uint8_t* x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        load_tile<4>(one.tiles[i], 64), load_tile<6>(x + i * kTileBytes, 64), dot_tiles<0, 4, 6>();
        load_tile<5>(other.tiles[i], 64), dot_tiles<1, 5, 6>();
        if constexpr (kPanels == 2) {
            load_tile<7>(x + (4 + i) * kTileBytes, 64), dot_tiles<2, 4, 7>(), dot_tiles<3, 5, 7>();
        }
    }
}

// Two groups of rows times several chunks of two panels or one, where no scale comes in. units:
// [chunk][group]; sums: of the first group, those of the second `apart` floats behind.
template <int kPanels>
inline void dot_slice(const Unit (*units)[2], int64_t chunks, const uint8_t* x, int64_t stride, float* sums,
                      int64_t apart) {
    load_tile<0>(sums, 64), load_tile<1>(sums + apart, 64);
    if constexpr (kPanels == 2) load_tile<2>(sums + 256, 64), load_tile<3>(sums + apart + 256, 64);
    for (int64_t c = 0; c < chunks; ++c) dot_four<kPanels>(units[c][0], units[c][1], x + c * stride);
    store_tile<0>(sums, 64), store_tile<1>(sums + apart, 64);
    if constexpr (kPanels == 2) store_tile<2>(sums + 256, 64), store_tile<3>(sums + apart + 256, 64);
}

// Sums of sixteen rows: a vector of tokens for each row, or of one token a vector of the rows.
template <bool kOne>
struct Sums {
    static constexpr int kVectors = kOne ? 1 : kTileRows;
    static constexpr int64_t kStride = kOne ? 4 : 64;  // of rows in memory
    __m512 v[kVectors];

    HADRON_LOCAL explicit Sums(const float* from) {
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) v[i] = _mm512_load_ps(from + i * 16);
    }
    HADRON_LOCAL void store(float* to) const {
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) _mm512_store_ps(to + i * 16, v[i]);
    }
    // += partial * scale for one scale of each row.
    HADRON_LOCAL void add_scaled(const uint8_t* partial, const float* scales) {
        if constexpr (kOne) {
            v[0] = _mm512_fmadd_ps(_mm512_load_ps(partial), _mm512_load_ps(scales), v[0]);
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < kTileRows; ++r)
                v[r] = _mm512_fmadd_ps(_mm512_load_ps(partial + r * 64), _mm512_set1_ps(scales[r]), v[r]);
        }
    }
};

// Whether scales are in tiles, or follow the sum.
template <Span kSpan>
constexpr bool kPlain = kSpan == Span::all || kSpan == Span::c16;

// sums += one unit times one panel, where scales come in: of sixteen rows by sixteen tokens, or by one.
template <Span kSpan, bool kOne, class Between>
HADRON_LOCAL void dot_scaled(const Unit& unit, const uint8_t* x, int64_t block, uint8_t* partial, float* to,
                             const Between& between) {
    constexpr int64_t kStride = Sums<kOne>::kStride;
    if constexpr (kSpan == Span::chunk) {
        clear_tile<0>();
        dot_chunk<0>(unit.tiles[0], kTileBytes, 64, x, block, between);
        store_tile<0>(partial, kStride);
    } else {
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        load_tile<4>(unit.tiles[0], 64), load_tile<6>(x, block / 16), dot_tiles<0, 4, 6>();
        load_tile<5>(unit.tiles[1], 64), load_tile<7>(x + block, block / 16), dot_tiles<1, 5, 7>();
        between(0), between(1);
        load_tile<4>(unit.tiles[2], 64), load_tile<6>(x + 2 * block, block / 16), dot_tiles<2, 4, 6>();
        load_tile<5>(unit.tiles[3], 64), load_tile<7>(x + 3 * block, block / 16), dot_tiles<3, 5, 7>();
        between(2), between(3);
        store_tile<0>(partial, kStride), store_tile<1>(partial + kTileBytes, kStride);
        store_tile<2>(partial + 2 * kTileBytes, kStride), store_tile<3>(partial + 3 * kTileBytes, kStride);
    }
    Sums<kOne> sums(to);
    for (int i = 0; i < scales_of(kSpan); ++i) sums.add_scaled(partial + i * kTileBytes, unit.scales[i]);
    sums.store(to);
}

// As `dot_slice` of one chunk and two panels, with one scale for each row of a unit.
inline void dot_scaled_four(const Unit (&units)[2], const uint8_t* x, uint8_t* partial, float* sums,
                            int64_t apart) {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    dot_four<2>(units[0], units[1], x);
    store_tile<0>(partial, 64), store_tile<1>(partial + kTileBytes, 64);
    store_tile<2>(partial + 2 * kTileBytes, 64), store_tile<3>(partial + 3 * kTileBytes, 64);
    for (int i = 0; i < 4; ++i) {
        float* to = sums + i % 2 * apart + i / 2 * 256;
        Sums<false> four(to);
        four.add_scaled(partial + i * kTileBytes, units[i % 2].scales[0]);
        four.store(to);
    }
}

// sums += one unit times one panel.
template <Span kSpan, class Between = Nothing>
HADRON_LOCAL void dot_unit(const Unit& unit, const uint8_t* x, int64_t block, uint8_t* partial, float* sums,
                           const Between& between = {}) {
    if constexpr (kPlain<kSpan>) {
        load_tile<0>(sums, 64);
        dot_chunk<0>(unit.tiles[0], kTileBytes, 64, x, block);
        store_tile<0>(sums, 64);
    } else {
        if (block == 64) return dot_scaled<kSpan, true>(unit, x, block, partial, sums, between);
        dot_scaled<kSpan, false>(unit, x, block, partial, sums, between);
    }
}

// What finishes the sums of sixteen rows: their scales and biases.
class Finish {
  public:
    Finish(const Weight& w, int64_t row, int64_t end) : row_(row) {
        alignas(64) float scale[kTileRows], bias[kTileRows];
        for (int64_t r = 0; r < kTileRows; ++r) {
            const bool inside = row + r < end;
            scale[r] = inside ? row_scale(w, row + r) : 0.0f;
            bias[r] = inside && w.bias ? load<float>(w.bias, row + r) : 0.0f;
        }
        by_ = _mm512_load_ps(scale), plus_ = _mm512_load_ps(bias);
        rows_ = static_cast<__mmask16>((1u << (end - row < kTileRows ? end - row : kTileRows)) - 1);
    }

    // To the results of `tokens` tokens; past the caches where there are more than these hold, since a line
    // that is written whole need not be read.
    void write(const float* sums, int64_t tokens, bool one, bool past_caches, float* const* y) const {
        __m512i v[kTileRows];
        for (int i = 0; i < (one ? 1 : kTileRows); ++i) v[i] = _mm512_load_si512(sums + 16 * i);
        if (!one) transpose(v);
        for (int64_t t = 0; t < tokens; ++t) {
            float* to = y[t] + row_;
            const __m512 result = _mm512_fmadd_ps(_mm512_castsi512_ps(v[t]), by_, plus_);
            if (past_caches && rows_ == 0xffff && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
                _mm512_stream_ps(to, result);
            } else {
                _mm512_mask_storeu_ps(to, rows_, result);
            }
        }
    }

  private:
    int64_t row_;
    __m512 by_, plus_;
    __mmask16 rows_;
};

}  // namespace
}  // namespace hadron::avx512_amx
