// The level `avx512_bf16` (AVX-512 F, BW, VL, VBMI, BF16): products straight from the packed codes.
//
// Codes of 128 columns, a chunk, unpack to four vectors of 32 bfloat16 in whatever order is cheapest; the
// activations are brought into that order once a call. A chunk is always
//
//     partial = dot(w3, x3, dot(w2, x2, dot(w1, x1, dot(w0, x0, 0))))
//     acc     = partial * scale + acc          (or partial + acc, where scales come after the sum)
//
// in sixteen lanes that are added up in one fixed order at the end. So a sum does not depend on how many
// tokens share a call: few tokens take `stream`, which unpacks into registers and reads every code once;
// many take `tile`, which unpacks sixteen rows to memory first.
#include <immintrin.h>

#include "avx512_unpack.h"
#include "formats.h"
#include "level.h"

namespace hadron::avx512_bf16 {
namespace {

namespace portable {
#include "portable.inc"
}

constexpr int kTileTokens = 6;  // accumulators of a tile: 4 rows x 6 tokens
constexpr int kTileRows = 4;
constexpr int kGroupRows = 16;  // rows unpacked at a time: they and the tokens stay in L2
constexpr int kStreamTokens = 6;
// Bytes ahead that are brought to L1 and, so that memory has as many lines under way as it takes, to L2.
constexpr int64_t kNear = 1024, kFar = 8192;

// Weights whose scales or codes this file does not unpack are multiplied portably.
bool packed(const Weight& w) {
    return unpack_order(w) != Order::none && scale_shape(w) != ScaleShape::other;
}

int64_t chunks(const Weight& w) {
    return (w.columns + kChunk - 1) / kChunk;
}

int order(const Weight& w) {
    if (!packed(w)) return portable::order(w);
    return 2 + static_cast<int>(unpack_order(w)) + (w.zeros ? 16 : 0);
}

// bfloat16 in unpacking order, then, where zero points are stored, sixteen sums a chunk.
int64_t prepared_bytes(const Weight& w) {
    if (!packed(w)) return (portable::prepared_bytes(w) + 63) / 64 * 64;
    return chunks(w) * (kChunk * 2 + (w.zeros ? 64 : 0));
}

void prepare(const Weight& w, const float* x, uint8_t* prepared) {
    if (!packed(w)) return portable::prepare(w, x, prepared);
    const Order by = unpack_order(w);
    const int64_t n = chunks(w);
    auto* out = reinterpret_cast<uint16_t*>(prepared);
    auto* sums = reinterpret_cast<float*>(prepared + n * kChunk * 2);
    for (int64_t c = 0; c < n; ++c) {
        alignas(64) float part[kChunk];
        const int64_t have = w.columns - c * kChunk < kChunk ? w.columns - c * kChunk : kChunk;
        for (int64_t k = 0; k < have; ++k) part[k] = x[c * kChunk + k];
        for (int64_t k = have; k < kChunk; ++k) part[k] = 0.0f;
        reorder(by, part, out + c * kChunk);
        if (w.zeros) _mm512_store_ps(sums + c * 16, lane_sums(out + c * kChunk));
    }
}

struct Bf16x4 {
    __m512i v[4];
};

inline __m512 dots(const Bf16x4& w, const uint16_t* x) {
    __m512 p = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i)
        p = _mm512_dpbf16_ps(p, (__m512bh)w.v[i], (__m512bh)_mm512_load_si512(x + 32 * i));
    return p;
}

// One chunk of one row with one token. scale: one vector, or two for the halves of the chunk.
template <ScaleShape kShape>
inline __m512 add_chunk(__m512 acc, const Bf16x4& w, const uint16_t* x, const __m512* scale) {
    if constexpr (kShape == ScaleShape::halves) {
        for (int h = 0; h < 2; ++h) {
            __m512 p = _mm512_setzero_ps();
            p = _mm512_dpbf16_ps(p, (__m512bh)w.v[2 * h], (__m512bh)_mm512_load_si512(x + 64 * h));
            p = _mm512_dpbf16_ps(p, (__m512bh)w.v[2 * h + 1], (__m512bh)_mm512_load_si512(x + 64 * h + 32));
            acc = _mm512_fmadd_ps(p, scale[h], acc);
        }
        return acc;
    } else if constexpr (kShape == ScaleShape::after) {
        return _mm512_add_ps(acc, dots(w, x));
    } else {
        return _mm512_fmadd_ps(dots(w, x), scale[0], acc);
    }
}

// The same with zero points: partial minus zero times the sum of the lane's activations.
inline __m512 add_chunk_zeros(__m512 acc, const Bf16x4& w, const uint16_t* x, __m512 sums, __m512 zero,
                              __m512 scale) {
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(zero, sums, dots(w, x)), scale, acc);
}

inline float finish(const Weight& w, int64_t row, __m512 acc) {
    return _mm512_reduce_add_ps(acc) * row_scale(w, row) + (w.bias ? load<float>(w.bias, row) : 0.0f);
}

// Rows with up to kStreamTokens tokens: every code is read, unpacked and used at once.
template <class Unpack, ScaleShape kShape, Deal kDeal, int kTokens>
void stream(const Weight& w, const uint8_t* const* x, int64_t first, int64_t last, float* const* y) {
    const Unpack unpack(w);
    const int64_t n = chunks(w);
    for (int64_t row = first; row < last; ++row) {
        const uint8_t* codes = w.codes + row * w.row_bytes;
        Scales<kShape, kDeal> scales(w, row);
        __m512 acc[kTokens];
        for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
        for (int64_t c = 0; c < n; ++c) {
            Bf16x4 v;
            if (c + 1 < n || w.columns % kChunk == 0) {
                for (int line = 0; line < Unpack::kBytes; line += 64) {
                    const auto* at = reinterpret_cast<const char*>(codes + c * Unpack::kBytes + line);
                    _mm_prefetch(at + kFar, _MM_HINT_T1);
                    _mm_prefetch(at + kNear, _MM_HINT_T0);
                }
                unpack(codes + c * Unpack::kBytes, v.v);
            } else {
                unpack.tail(codes + c * Unpack::kBytes, w.columns - c * kChunk, v.v);
            }
            __m512 scale[2];
            scales.chunk(c, scale);
            for (int t = 0; t < kTokens; ++t) {
                const auto* xt = reinterpret_cast<const uint16_t*>(x[t]);
                if (kShape == ScaleShape::lanes && w.zeros) {
                    const __m512 sums =
                        _mm512_load_ps(reinterpret_cast<const float*>(xt + n * kChunk) + c * 16);
                    acc[t] = add_chunk_zeros(acc[t], v, xt + c * kChunk, sums, scales.zero(c), scale[0]);
                } else {
                    acc[t] = add_chunk<kShape>(acc[t], v, xt + c * kChunk, scale);
                }
            }
        }
        for (int t = 0; t < kTokens; ++t) y[t][row] = finish(w, row, acc[t]);
    }
}

constexpr int scale_vectors(ScaleShape shape) {
    return shape == ScaleShape::after ? 0 : shape == ScaleShape::halves ? 2 : 1;
}

// What `tile` keeps of an unpacked chunk: four vectors of codes, then scales, then zero points.
template <ScaleShape kShape>
int64_t unpacked_bytes(const Weight& w) {
    return 256 + 64 * scale_vectors(kShape) + (w.zeros ? 64 : 0);
}

template <class Unpack, ScaleShape kShape, Deal kDeal>
void unpack_rows(const Weight& w, int64_t first, int64_t count, uint8_t* to) {
    const Unpack unpack(w);
    const int64_t n = chunks(w), size = unpacked_bytes<kShape>(w);
    for (int64_t r = 0; r < count; ++r) {
        const uint8_t* codes = w.codes + (first + r) * w.row_bytes;
        Scales<kShape, kDeal> scales(w, first + r);
        for (int64_t c = 0; c < n; ++c) {
            __m512i v[4];
            if (c + 1 < n || w.columns % kChunk == 0) {
                unpack(codes + c * Unpack::kBytes, v);
            } else {
                unpack.tail(codes + c * Unpack::kBytes, w.columns - c * kChunk, v);
            }
            uint8_t* at = to + (r * n + c) * size;
            for (int i = 0; i < 4; ++i) _mm512_store_si512(at + 64 * i, v[i]);
            __m512 scale[2];
            scales.chunk(c, scale);
            for (int i = 0; i < scale_vectors(kShape); ++i) _mm512_store_ps(at + 256 + 64 * i, scale[i]);
            if (kShape == ScaleShape::lanes && w.zeros) _mm512_store_ps(at + 256 + 64, scales.zero(c));
        }
    }
}

// kRows unpacked rows with kTokens tokens, over all columns: the accumulators never leave registers.
template <ScaleShape kShape, bool kZeros, int kRows, int kTokens>
void tile(const Weight& w, const uint8_t* unpacked, const uint8_t* const* x, int64_t row, float* const* y) {
    const int64_t n = chunks(w), size = unpacked_bytes<kShape>(w);
    __m512 acc[kRows][kTokens];
    for (auto& of_row : acc) {
        for (auto& a : of_row) a = _mm512_setzero_ps();
    }
    for (int64_t c = 0; c < n; ++c) {
        for (int t = 0; t < kTokens; ++t) {
            const auto* xt = reinterpret_cast<const uint16_t*>(x[t]);
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* at = unpacked + (r * n + c) * size;
                Bf16x4 v;
                for (int i = 0; i < 4; ++i) v.v[i] = _mm512_load_si512(at + 64 * i);
                __m512 scale[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
                for (int i = 0; i < scale_vectors(kShape); ++i) scale[i] = _mm512_load_ps(at + 256 + 64 * i);
                if constexpr (kZeros) {
                    const __m512 sums =
                        _mm512_load_ps(reinterpret_cast<const float*>(xt + n * kChunk) + c * 16);
                    acc[r][t] = add_chunk_zeros(acc[r][t], v, xt + c * kChunk, sums, _mm512_load_ps(at + 320),
                                                scale[0]);
                } else {
                    acc[r][t] = add_chunk<kShape>(acc[r][t], v, xt + c * kChunk, scale);
                }
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int t = 0; t < kTokens; ++t) y[t][row + r] = finish(w, row + r, acc[r][t]);
    }
}

template <ScaleShape kShape, bool kZeros, int kRows>
void tile_tokens(const Weight& w, const uint8_t* unpacked, const uint8_t* const* x, int64_t tokens,
                 int64_t row, float* const* y) {
    switch (tokens) {
        case 1:
            return tile<kShape, kZeros, kRows, 1>(w, unpacked, x, row, y);
        case 2:
            return tile<kShape, kZeros, kRows, 2>(w, unpacked, x, row, y);
        case 3:
            return tile<kShape, kZeros, kRows, 3>(w, unpacked, x, row, y);
        case 4:
            return tile<kShape, kZeros, kRows, 4>(w, unpacked, x, row, y);
        case 5:
            return tile<kShape, kZeros, kRows, 5>(w, unpacked, x, row, y);
        default:
            return tile<kShape, kZeros, kRows, 6>(w, unpacked, x, row, y);
    }
}

template <class Unpack, ScaleShape kShape, Deal kDeal, bool kZeros>
void many(const Weight& w, const uint8_t* const* x, int64_t tokens, int64_t first, int64_t last,
          float* const* y, uint8_t* scratch) {
    const int64_t row_size = chunks(w) * unpacked_bytes<kShape>(w);
    for (int64_t from = first; from < last; from += kGroupRows) {
        const int64_t count = last - from < kGroupRows ? last - from : kGroupRows;
        unpack_rows<Unpack, kShape, kDeal>(w, from, count, scratch);
        for (int64_t t = 0; t < tokens; t += kTileTokens) {
            const int64_t some = tokens - t < kTileTokens ? tokens - t : kTileTokens;
            int64_t r = 0;
            for (; r + kTileRows <= count; r += kTileRows) {
                tile_tokens<kShape, kZeros, kTileRows>(w, scratch + r * row_size, x + t, some, from + r,
                                                       y + t);
            }
            for (; r < count; ++r)
                tile_tokens<kShape, kZeros, 1>(w, scratch + r * row_size, x + t, some, from + r, y + t);
        }
    }
}

template <class Unpack, ScaleShape kShape, Deal kDeal = Deal::none>
void rows_of(const Weight& w, const uint8_t* const* x, int64_t tokens, int64_t first, int64_t last,
             float* const* y, uint8_t* scratch) {
    switch (tokens) {
        case 1:
            return stream<Unpack, kShape, kDeal, 1>(w, x, first, last, y);
        case 2:
            return stream<Unpack, kShape, kDeal, 2>(w, x, first, last, y);
        case 3:
            return stream<Unpack, kShape, kDeal, 3>(w, x, first, last, y);
        case 4:
            return stream<Unpack, kShape, kDeal, 4>(w, x, first, last, y);
        case 5:
            return stream<Unpack, kShape, kDeal, 5>(w, x, first, last, y);
        case 6:
            return stream<Unpack, kShape, kDeal, 6>(w, x, first, last, y);
        default:
            break;
    }
    if (kShape == ScaleShape::lanes && w.zeros)
        return many<Unpack, kShape, kDeal, true>(w, x, tokens, first, last, y, scratch);
    return many<Unpack, kShape, kDeal, false>(w, x, tokens, first, last, y, scratch);
}

// Rows of codes in groups: the two published kinds of scales, and any other.
template <class Unpack, ScaleShape kShape>
void rows_in_groups(const Weight& w, const uint8_t* const* x, int64_t tokens, int64_t first, int64_t last,
                    float* const* y, uint8_t* scratch) {
    switch (deal(w)) {
        case Deal::e8m0_32:
            return rows_of<Unpack, kShape, Deal::e8m0_32>(w, x, tokens, first, last, y, scratch);
        case Deal::e4m3_16:
            return rows_of<Unpack, kShape, Deal::e4m3_16>(w, x, tokens, first, last, y, scratch);
        default:
            return rows_of<Unpack, kShape>(w, x, tokens, first, last, y, scratch);
    }
}

template <class Unpack>
void rows_with(const Weight& w, const uint8_t* const* x, int64_t tokens, int64_t first, int64_t last,
               float* const* y, uint8_t* scratch) {
    constexpr bool kNibbles = Unpack::kBytes == 64;
    switch (scale_shape(w)) {
        case ScaleShape::after:
            return rows_of<Unpack, ScaleShape::after>(w, x, tokens, first, last, y, scratch);
        case ScaleShape::chunk:
            return rows_of<Unpack, ScaleShape::chunk>(w, x, tokens, first, last, y, scratch);
        default:  // the order in which codes unpack decides
            return rows_in_groups<Unpack, kNibbles ? ScaleShape::lanes : ScaleShape::halves>(
                w, x, tokens, first, last, y, scratch);
    }
}

void rows(const Weight& w, const Prepared& prepared, int64_t first, int64_t last, float* const* y,
          uint8_t* scratch) {
    const uint8_t* const* x = prepared.rows;
    const int64_t tokens = prepared.tokens;
    if (tokens == 0 || first == last) return;
    if (!packed(w)) return portable::rows(w, prepared, first, last, y, scratch);
    switch (w.element) {
        case Element::bf16:
            return rows_of<UnpackBf16, ScaleShape::after>(w, x, tokens, first, last, y, scratch);
        case Element::e4m3:
            return rows_with<UnpackE4m3<>>(w, x, tokens, first, last, y, scratch);
        case Element::int8:
            return rows_with<UnpackInt8<>>(w, x, tokens, first, last, y, scratch);
        case Element::e2m3:
        case Element::e3m2:
            return rows_with<UnpackSixBits<>>(w, x, tokens, first, last, y, scratch);
        default:
            return rows_with<UnpackNibbles>(w, x, tokens, first, last, y, scratch);
    }
}

int64_t scratch_bytes(const Weight& w, int64_t tokens) {
    if (!packed(w)) return (portable::scratch_bytes(w, tokens) + 63) / 64 * 64;
    return tokens <= kStreamTokens ? 64 : kGroupRows * chunks(w) * (256 + 128 + 64);
}

}  // namespace

constinit const Kernels kKernels = {"avx512_bf16", order, prepared_bytes, prepare,
                                    scratch_bytes, rows,  portable::gate, portable::dequantize};

}  // namespace hadron::avx512_bf16
