// MXFP4 by integer tiles: the level's own way for FP4 in blocks of 32 with powers of two as scales.
//
// A unit is sixteen rows by a chunk of 128 columns, as everywhere in this level, but its tiles hold integers.
// The scales of a row differ little within a chunk, so a code becomes
//
//     2 value(code) 2^(3 - d)        d: how many binades its block lies under the largest of the row, 0 to 3
//
// of at most 96: half as many bytes as bfloat16, by one permute for 64 codes, and the products with another
// integer are exact. Blocks that lie lower take a further step over the same chunk, in which what was taken
// is zero. Activations become integers of sixteen bits, two limbs of eight, relative to the largest of their
// chunk: those of at least 1/64 of it lose nothing that bfloat16 has, the others at most 2^-15 of it.
//
//     acc = (256 high + low) * scale of the activations * scale of the row + acc
//
// by float32 FMA after every step. Limbs of up to eight tokens are columns of one tile.
#pragma once

#include <algorithm>

#include "amx_weights.h"

namespace hadron::avx512_amx {
namespace {

constexpr int kLimbOrder = 96;
constexpr int kMostSteps = 4;  // over a chunk: one for each block

inline bool takes_limbs(const Weight& w) {
    return w.element == Element::e2m1 && w.rounds() && w.granularity == Granularity::group &&
           w.scale_type == ScaleType::e8m0 && w.block_columns == 32 && w.zeros == nullptr;
}

// Two bits for each block of 32 columns say how far it lies under the largest.
struct LimbTables {
    alignas(64) uint8_t of[256][64];

    LimbTables() {
        for (uint32_t distances = 0; distances < 256; ++distances) {
            for (uint32_t at = 0; at < 64; ++at) {
                const uint32_t d = distances >> (at / 16 * 2) & 3u;
                const float value = code_value(Element::e2m1, at % 16) * static_cast<float>(2 << (3 - d));
                of[distances][at] = static_cast<uint8_t>(static_cast<int8_t>(value));
            }
        }
    }
    static const LimbTables& get() {
        static const LimbTables tables;
        return tables;
    }
};

// Prepared activations: for each chunk [half][16 groups][4 high, 4 low], of even columns and of odd ones, as
// nibbles lie; then the scale of each chunk.
inline const float* limb_scales(const uint8_t* prepared, int64_t chunks) {
    return reinterpret_cast<const float*>(prepared + chunks * kChunk * 2);
}

inline int64_t limb_bytes(int64_t chunks) {
    return chunks * kChunk * 2 + (chunks * 4 + 63) / 64 * 64;
}

// One chunk; the scale that its integers have, NaN where an activation is not finite.
inline float prepare_limbs(const float* x, uint8_t* out) {
    __m512 v[8];
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
        const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + 16 * i));
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
        v[i] = _mm512_castsi512_ps(bits);
    }
    const auto largest = static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
    const bool finite = largest < 0x7f800000u;
    // what would be 32640 takes the next binade, since the high limb would be 128
    const uint32_t exponent = std::clamp<uint32_t>((largest + 0x10000u) >> 23, 15, 254);
    const __m512 inverse = _mm512_set1_ps(finite ? from_bits((268 - exponent) << 23) : 0.0f);
    alignas(64) uint8_t high[kChunk], low[kChunk];
    for (int i = 0; i < 8; ++i) {
        const __m512i fixed = _mm512_maskz_cvtps_epi32(finite ? 0xffff : 0, _mm512_mul_ps(v[i], inverse));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(128)), 8);
        _mm_store_si128(reinterpret_cast<__m128i*>(high + 16 * i), _mm512_cvtepi32_epi8(upper));
        _mm_store_si128(reinterpret_cast<__m128i*>(low + 16 * i), _mm512_cvtepi32_epi8(fixed));
    }
    alignas(64) uint8_t place[64];  // in 64 high limbs and 64 low ones behind them
    for (int at = 0; at < 64; ++at)
        place[at] = static_cast<uint8_t>(at / 4 % 2 * 64 + at / 8 * 8 + at % 4 * 2);
    for (int half = 0; half < 2; ++half) {
        const __m512i index =
            _mm512_add_epi8(_mm512_load_si512(place), _mm512_set1_epi8(static_cast<char>(half)));
        for (int i = 0; i < 2; ++i) {
            _mm512_store_si512(out + (half * 2 + i) * 64,
                               _mm512_permutex2var_epi8(_mm512_load_si512(high + 64 * i), index,
                                                        _mm512_load_si512(low + 64 * i)));
        }
    }
    return finite ? from_bits((exponent - 14) << 23) : std::numeric_limits<float>::quiet_NaN();
}

// What is taken of sixteen rows of a chunk at once.
struct LimbStep {
    alignas(64) float scales[kTileRows];  // of rows
    alignas(16) uint8_t distances[kTileRows];
    uint16_t rows[4];  // of which each block is taken
    int64_t chunk;
    bool whole;  // all of them
};

// The steps of sixteen rows over their chunks, in order.
class LimbSteps {
  public:
    void start(const Weight& w, int64_t first, int64_t end) {
        scales_.start(w, first, end);
        left_ = 0;
    }

    // The first step of a chunk, or the next where `more` says so.
    HADRON_LOCAL void next(int64_t c, LimbStep& step) {
        if (left_ == 0) codes_ = scales_.codes(c), left_ = ~0ull;
        step.chunk = c;
        __m128i codes[4], most = _mm_setzero_si128();
        const bool all = left_ == ~0ull;
        for (int i = 0; i < 4; ++i) {
            codes[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(codes_ + code_place(i, 0)));
            if (!all) codes[i] = _mm_maskz_mov_epi8(left(i), codes[i]);
            most = _mm_max_epu8(most, codes[i]);
        }
        __m128i distances = _mm_setzero_si128(), farthest = distances;
        for (int i = 3; i >= 0; --i) {
            const __m128i d = _mm_sub_epi8(most, codes[i]);
            farthest = _mm_max_epu8(farthest, d);
            distances = _mm_add_epi8(distances, distances);
            distances = _mm_add_epi8(_mm_add_epi8(distances, distances), d);
        }
        const __m128i three = _mm_set1_epi8(3);
        step.whole = all && _mm_cmpgt_epu8_mask(farthest, three) == 0;
        if (step.whole) [[likely]] {
            left_ = 0;
        } else {
            distances = take(codes, most, step);
        }
        _mm_store_si128(reinterpret_cast<__m128i*>(step.distances), distances);
        // 2^-4: values are held 16 times as large
        const __m128i apart = _mm_sub_epi8(most, _mm_set1_epi8(64));
        const __m512i exponents = _mm512_slli_epi32(_mm512_cvtepu8_epi32(most), 23);
        const bool usual = _mm_cmpge_epu8_mask(apart, _mm_set1_epi8(127)) == 0;
        const __m512 by = usual ? _mm512_castsi512_ps(exponents) : avx512_bf16::e8m0_vector(most);
        _mm512_store_ps(step.scales, _mm512_mul_ps(by, _mm512_set1_ps(0x1p-4f)));
    }
    bool more() const { return left_ != 0; }

  private:
    __mmask16 left(int block) const { return static_cast<__mmask16>(left_ >> (16 * block)); }

    // What lies within three binades of the largest that is left; the distances of that.
    __attribute__((noinline)) __m128i take(const __m128i* codes, __m128i most, LimbStep& step) {
        __m128i distances = _mm_setzero_si128();
        for (int i = 3; i >= 0; --i) {
            const __m128i d = _mm_sub_epi8(most, codes[i]);
            const auto near = static_cast<__mmask16>(_mm_cmple_epu8_mask(d, _mm_set1_epi8(3)) & left(i));
            step.rows[i] = near;
            left_ &= ~(static_cast<uint64_t>(near) << (16 * i));
            distances = _mm_add_epi8(distances, distances);
            distances = _mm_add_epi8(_mm_add_epi8(distances, distances), _mm_maskz_mov_epi8(near, d));
        }
        return distances;
    }

    TileScales<Span::c32> scales_;
    const uint8_t* codes_ = nullptr;
    uint64_t left_ = 0;  // sixteen rows of each block
};

struct LimbUnit {
    alignas(64) uint8_t tiles[2][kTileBytes];  // even columns, odd columns
};

// Rows [8 part, 8 part + 8) of a step. in(r, table) is what stands for the codes of a row.
template <class In>
HADRON_LOCAL void unpack_limb_rows(const Source& from, const LimbTables& tables, const LimbStep& step,
                                   int part, LimbUnit& unit, const In& in) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const int64_t left = from.columns - step.chunk * kChunk;
    const auto row = [&](int r, const uint8_t* codes) __attribute__((always_inline)) {
        const __m512i c = _mm512_loadu_si512(codes);
        const __m512i table = in(r, _mm512_load_si512(tables.of[step.distances[r]]));
        const __m512i even = _mm512_and_si512(c, nibble),
                      odd = _mm512_and_si512(_mm512_srli_epi16(c, 4), nibble);
        _mm512_store_si512(unit.tiles[0] + r * 64, _mm512_shuffle_epi8(table, even));
        _mm512_store_si512(unit.tiles[1] + r * 64, _mm512_shuffle_epi8(table, odd));
    };
    if (left >= kChunk) [[likely]] {
#pragma GCC unroll 8
        for (int r = part * 8; r < part * 8 + 8; ++r) row(r, from.rows[r] + step.chunk * 64);
    } else {
        alignas(64) uint8_t filled_up[64];
        for (int r = part * 8; r < part * 8 + 8; ++r)
            row(r, filled_up_nibbles(from.rows[r] + step.chunk * 64, left, filled_up));
    }
}

__attribute__((noinline)) void unpack_some_limbs(const Source& from, const LimbTables& tables,
                                                 const LimbStep& step, int part, LimbUnit& unit) {
    unpack_limb_rows(from, tables, step, part, unit, [&](int r, __m512i table) {
        uint64_t taken = 0;
        for (int i = 0; i < 4; ++i) taken |= (step.rows[i] >> r & 1u) * (0xffffull << (16 * i));
        return _mm512_maskz_mov_epi8(taken, table);
    });
}

HADRON_LOCAL void unpack_limbs(const Source& from, const LimbTables& tables, const LimbStep& step, int part,
                               LimbUnit& unit) {
    if (!step.whole) [[unlikely]]
        return unpack_some_limbs(from, tables, step, part, unit);
    unpack_limb_rows(from, tables, step, part, unit,
                     [](int, __m512i table) __attribute__((always_inline)) { return table; });
}

}  // namespace
}  // namespace hadron::avx512_amx
