// Queries against rows at the level `avx512_bf16`: bfloat16 rows are multiplied as they lie, two elements at
// a time broadcast from the row, with dots whose sums are float32.
//
// Two dots a cycle would need more than two loads a cycle; a tile of eight rows (or columns) by two vectors
// of queries needs ten loads for sixteen dots.
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "avx512_unpack.h"
#include "formats.h"
#include "lanes.h"

namespace hadron::avx512_bf16 {
namespace {

namespace portable {
#pragma GCC diagnostic ignored "-Wunused-function"
#include "vectors.inc"
//
#include "lanes.inc"
}  // namespace portable

constexpr int kTile = 8;
static_assert(kGroup == 32);

inline int64_t pairs(int64_t width) {
    return (width + 1) / 2;
}

inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

inline __m512i to_halves(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

inline __mmask16 first_lanes(int64_t n) {
    return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n < 0 ? 0 : n)) - 1);
}

int64_t query_bytes(int64_t width) {
    return pairs(width) * kGroup * 4;
}

// [pair of elements][lane][2]: rounded row by row, then dealt to lanes by gathers.
void pack_queries(const float* q, int64_t stride, int64_t count, int64_t width, uint8_t* out) {
    constexpr int kTogether = 16;  // pairs of a row
    alignas(64) uint32_t rounded[kGroup][kTogether];
    const __m512i lanes = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(kTogether));
    std::memset(rounded, 0, sizeof rounded);
    for (int64_t from = 0; from < pairs(width); from += kTogether) {
        const int64_t left = width - 2 * from;
        for (int64_t lane = 0; lane < count; ++lane) {
            const float* row = q + lane * stride + 2 * from;
            const __m512 low = _mm512_maskz_loadu_ps(first_lanes(left), row),
                         high = _mm512_maskz_loadu_ps(first_lanes(left - 16), row + 16);
            _mm512_store_si512(rounded[lane], to_halves(low, high));
        }
        const int64_t end = pairs(width) - from < kTogether ? pairs(width) - from : kTogether;
        for (int64_t k = 0; k < end; ++k) {
            auto* to = out + (from + k) * kGroup * 4;
            _mm512_storeu_si512(to, _mm512_i32gather_epi32(lanes, &rounded[0][k], 4));
            _mm512_storeu_si512(to + 64, _mm512_i32gather_epi32(lanes, &rounded[16][k], 4));
        }
    }
}

void dots(const uint8_t* queries, const uint8_t* const* rows, int64_t count, int64_t width, float* s) {
    for (int64_t r = 0; r < count; r += kTile) {
        __m512 acc[kTile][2];
        for (auto& of_row : acc) of_row[0] = of_row[1] = _mm512_setzero_ps();
        const uint8_t* row[kTile];
        for (int i = 0; i < kTile; ++i) row[i] = rows[r + i];
        const int64_t whole = width / 2;
        for (int64_t k = 0; k < whole; ++k) {
            const __m512i q0 = _mm512_loadu_si512(queries + k * 128),
                          q1 = _mm512_loadu_si512(queries + k * 128 + 64);
            for (int i = 0; i < kTile; ++i) {
                const __m512i two = _mm512_set1_epi32(load<int32_t>(row[i], k));
                acc[i][0] = dot(acc[i][0], two, q0), acc[i][1] = dot(acc[i][1], two, q1);
            }
        }
        if (width % 2 != 0) {
            const __m512i q0 = _mm512_loadu_si512(queries + whole * 128),
                          q1 = _mm512_loadu_si512(queries + whole * 128 + 64);
            for (int i = 0; i < kTile; ++i) {
                const __m512i one = _mm512_set1_epi32(load<uint16_t>(row[i], width - 1));
                acc[i][0] = dot(acc[i][0], one, q0), acc[i][1] = dot(acc[i][1], one, q1);
            }
        }
        for (int i = 0; i < kTile; ++i) {
            _mm512_storeu_ps(s + (r + i) * kGroup, acc[i][0]);
            _mm512_storeu_ps(s + (r + i) * kGroup + 16, acc[i][1]);
        }
    }
}

// Values lie by pairs of rows, for that is what a dot adds: tiles of sixteen columns, [pair][column][2].
// Interleaving within 128-bit parts is cheapest: two tiles share 32 columns, four and four in turn. Tiles
// are 64 bytes farther apart than they must be, so that stores to all of them do not fall into one set.
constexpr int64_t kTileBytes = kRanks / 2 * 64 + 64;

inline int64_t column_of(int64_t tile, int64_t i) {
    return tile / 2 * 32 + i / 4 * 8 + tile % 2 * 4 + i % 4;
}

int64_t value_bytes(int64_t columns) {
    return mixed_columns(columns) / 16 * kTileBytes;
}

void pack_values(const uint8_t* const* rows, int64_t count, int64_t columns, uint8_t* out) {
    for (int64_t r = 0; r < count; r += 2) {
        for (int64_t c = 0; c < columns; c += 32) {
            const int64_t left = columns - c;
            const __mmask32 have = left >= 32 ? 0xffffffffu : (1u << left) - 1;
            const __m512i a = _mm512_maskz_loadu_epi16(have, rows[r] + 2 * c);
            const __m512i b =
                r + 1 < count ? _mm512_maskz_loadu_epi16(have, rows[r + 1] + 2 * c) : _mm512_setzero_si512();
            uint8_t* to = out + c / 16 * kTileBytes + r * 32;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(to + kTileBytes, _mm512_unpackhi_epi16(a, b));
        }
    }
}

void mix(const uint8_t* values, const float* weights, int64_t count, int64_t columns, const float* alpha,
         float* mixed) {
    alignas(64) uint16_t even_odd[32];
    for (int j = 0; j < 16; ++j)
        even_odd[2 * j] = static_cast<uint16_t>(j), even_odd[2 * j + 1] = static_cast<uint16_t>(16 + j);
    const __m512i order = _mm512_load_si512(even_odd);
    alignas(64) uint8_t by_pairs[kRanks / 2][128];
    for (int64_t r = 0; r < count; r += 2) {
        for (int j = 0; j < 2; ++j) {
            const float* at = weights + r * kGroup + 16 * j;
            const __m512 even = _mm512_loadu_ps(at),
                         odd = r + 1 < count ? _mm512_loadu_ps(at + kGroup) : _mm512_setzero_ps();
            _mm512_store_si512(by_pairs[r / 2] + 64 * j,
                               _mm512_permutexvar_epi16(order, to_halves(even, odd)));
        }
    }
    const __m512 a0 = _mm512_loadu_ps(alpha), a1 = _mm512_loadu_ps(alpha + 16);
    for (int64_t tile = 0; tile < mixed_columns(columns) / 16; ++tile) {
        for (int half = 0; half < 2; ++half) {
            const uint8_t* from = values + tile * kTileBytes + 32 * half;
            float* to[kTile];
            __m512 acc[kTile][2];
            for (int i = 0; i < kTile; ++i) {
                to[i] = mixed + column_of(tile, 8 * half + i) * kGroup;
                acc[i][0] = _mm512_mul_ps(_mm512_loadu_ps(to[i]), a0);
                acc[i][1] = _mm512_mul_ps(_mm512_loadu_ps(to[i] + 16), a1);
            }
            for (int64_t p = 0; p < pairs(count); ++p) {
                const __m512i p0 = _mm512_load_si512(by_pairs[p]), p1 = _mm512_load_si512(by_pairs[p] + 64);
                for (int i = 0; i < kTile; ++i) {
                    const __m512i two = _mm512_set1_epi32(load<int32_t>(from + p * 64, i));
                    acc[i][0] = dot(acc[i][0], two, p0), acc[i][1] = dot(acc[i][1], two, p1);
                }
            }
            for (int i = 0; i < kTile; ++i) {
                _mm512_storeu_ps(to[i], acc[i][0]);
                _mm512_storeu_ps(to[i] + 16, acc[i][1]);
            }
        }
    }
}

// Sixteen sums of sixteen lanes at once, every one added up in the same order.
inline __m512 sums(const __m512* t) {
    __m512 u[8], v[4], w[2];
    for (int i = 0; i < 8; ++i) {
        u[i] = _mm512_add_ps(_mm512_shuffle_f32x4(t[i], t[i + 8], 0x44),
                             _mm512_shuffle_f32x4(t[i], t[i + 8], 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u[i], u[i + 4], 0x88),
                             _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
        w[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 x = _mm512_add_ps(_mm512_shuffle_ps(w[0], w[1], 0x88), _mm512_shuffle_ps(w[0], w[1], 0xdd));
    // Parts hold rows 0, 8, 4 and 12 on; within a part 0, 2, 1, 3.
    const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
    return _mm512_permutexvar_ps(order, x);
}

void score(const float* s, int64_t count, const float* weights, bool add, float* out) {
    const __m512 w0 = _mm512_loadu_ps(weights), w1 = _mm512_loadu_ps(weights + 16),
                 zero = _mm512_setzero_ps();
    for (int64_t r = 0; r < count; r += 16) {
        __m512 t[16];
        for (int i = 0; i < 16; ++i) {
            const float* at = s + (r + i) * kGroup;
            // The second operand of max is what a NaN gives: it stays NaN.
            const __m512 x0 = _mm512_max_ps(zero, _mm512_loadu_ps(at)),
                         x1 = _mm512_max_ps(zero, _mm512_loadu_ps(at + 16));
            t[i] = _mm512_fmadd_ps(x1, w1, _mm512_mul_ps(x0, w0));
        }
        __m512 x = sums(t);
        if (add) x = _mm512_add_ps(_mm512_loadu_ps(out + r), x);
        _mm512_storeu_ps(out + r, x);
    }
}

// A row of packed codes as float32 in unpacking order: vector, then word of a lane, then lane.
template <class Unpack, ScaleShape kShape, Deal kDeal>
class Expand {
  public:
    explicit Expand(const Weight& w) : w_(w), unpack_(w), chunks_((w.columns + kChunk - 1) / kChunk) {}

    void operator()(int64_t row, float* out) const {
        const uint8_t* codes = w_.codes + row * w_.row_bytes;
        Scales<kShape, kDeal> scales(w_, row);
        const __m512 of_row = _mm512_set1_ps(row_scale(w_, row));
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        for (int64_t c = 0; c < chunks_; ++c) {
            __m512i v[4];
            __m512 scale[2] = {of_row, of_row}, zero = _mm512_setzero_ps();
            if ((c + 1) * kChunk <= w_.columns) {
                _mm_prefetch(reinterpret_cast<const char*>(codes + c * Unpack::kBytes + 2048), _MM_HINT_T0);
                unpack_(codes + c * Unpack::kBytes, v);
            } else {
                unpack_.tail(codes + c * Unpack::kBytes, w_.columns - c * kChunk, v);
            }
            if constexpr (kShape != ScaleShape::after) {
                scales.chunk(c, scale);
                if constexpr (kShape != ScaleShape::halves) scale[1] = scale[0];
                for (auto& s : scale) s = _mm512_mul_ps(s, of_row);
            }
            if constexpr (kShape == ScaleShape::lanes) {
                if (w_.zeros) zero = scales.zero(c);
            }
            for (int i = 0; i < 4; ++i) {
                const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(v[i], 16)),
                             high = _mm512_castsi512_ps(_mm512_and_si512(v[i], upper));
                float* at = out + c * kChunk + i * 32;
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_sub_ps(low, zero), scale[i / 2]));
                _mm512_storeu_ps(at + 16, _mm512_mul_ps(_mm512_sub_ps(high, zero), scale[i / 2]));
            }
        }
    }

  private:
    const Weight& w_;
    const Unpack unpack_;
    int64_t chunks_;
};

// Place in such a row -> column.
inline int64_t unpacked_column(Order order, int64_t place) {
    const int64_t chunk = place / kChunk, i = place % kChunk / 32, word = place % 16 * 2 + place % 32 / 16;
    switch (order) {
        case Order::nibbles:
            return chunk * kChunk + 4 * word + i;
        case Order::bytes:
            return chunk * kChunk + 64 * (i / 2) + 16 * (word / 8) + 8 * (i % 2) + word % 8;
        default:
            return chunk * kChunk + 32 * i + word;
    }
}

template <class Unpack, ScaleShape kShape, Deal kDeal = Deal::none>
void absorb_as(const Weight& w, int64_t first, int64_t count, const float* const* q, int64_t tokens,
               float* const* out, uint8_t* scratch) {
    const int64_t columns = portable::absorb_columns(w);
    auto* rows = reinterpret_cast<float*>(scratch);
    float* sums_of = rows + portable::kRowsTogether * columns;
    const Expand<Unpack, kShape, kDeal> expand(w);
    portable::absorb_with(expand, first, count, columns, q, tokens, rows, sums_of);
    const Order order = unpack_order(w);
    for (int64_t place = 0; place < columns; ++place) {
        const int64_t column = unpacked_column(order, place);
        if (column >= w.columns) continue;
        for (int64_t t = 0; t < tokens; ++t) out[t][column] = sums_of[t * columns + place];
    }
}

using Absorb = void (*)(const Weight&, int64_t, int64_t, const float* const*, int64_t, float* const*,
                        uint8_t*);

template <class Unpack, ScaleShape kShape>
Absorb absorb_by_deal(const Weight& w) {
    switch (deal(w)) {
        case Deal::e8m0_32:
            return absorb_as<Unpack, kShape, Deal::e8m0_32>;
        case Deal::e4m3_16:
            return absorb_as<Unpack, kShape, Deal::e4m3_16>;
        default:
            return absorb_as<Unpack, kShape>;
    }
}

template <class Unpack>
Absorb absorb_by_scales(const Weight& w) {
    switch (scale_shape(w)) {
        case ScaleShape::after:
            return absorb_as<Unpack, ScaleShape::after>;
        case ScaleShape::chunk:
            return absorb_as<Unpack, ScaleShape::chunk>;
        case ScaleShape::lanes:
            return absorb_by_deal<Unpack, ScaleShape::lanes>(w);
        default:
            return absorb_by_deal<Unpack, ScaleShape::halves>(w);
    }
}

void absorb(const Weight& w, int64_t first, int64_t count, const float* const* q, int64_t tokens,
            float* const* out, uint8_t* scratch) {
    if (unpack_order(w) == Order::none || scale_shape(w) == ScaleShape::other)
        return portable::absorb_any(kKernels.dequantize, w, first, count, q, tokens, out, scratch);
    Absorb chosen = absorb_by_scales<UnpackNibbles>(w);
    if (w.element == Element::bf16) {
        chosen = absorb_as<UnpackBf16, ScaleShape::after>;
    } else if (w.element == Element::e4m3) {
        chosen = absorb_by_scales<UnpackE4m3<>>(w);
    } else if (w.element == Element::int8) {
        chosen = absorb_by_scales<UnpackInt8<>>(w);
    } else if (w.element == Element::e2m3 || w.element == Element::e3m2) {
        chosen = absorb_by_scales<UnpackSixBits<>>(w);
    }
    chosen(w, first, count, q, tokens, out, scratch);
}

constinit const RowOps kHalf = {query_bytes, pack_queries, dots, value_bytes, pack_values, mix};

}  // namespace

constinit const LaneOps kLaneOps = {
    {portable::query_bytes, portable::pack_queries, portable::dots, portable::value_bytes,
     portable::pack_values, portable::mix},
    &kHalf,
    portable::weigh,
    portable::join,
    portable::finish,
    score,
    absorb,
    portable::absorb_bytes,
    portable::pool,
    portable::widen,
    portable::narrow,
};

}  // namespace hadron::avx512_bf16
