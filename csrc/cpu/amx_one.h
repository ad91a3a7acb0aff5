// One token times FP4 or INT4: rows are read one after another and multiplied in vectors of float32, since
// unpacking a tile takes longer than reading sixteen of them from memory does.
//
// The bits are those of tiles. A dot of tiles adds the even and the odd places of its 32 columns up from
// zero, in order, then both (products of bfloat16 are exact in float32). Here sixteen dots of a row lie in
// lanes, so that each step of both sums is one FMA. What comes after a dot - scales, sums over dots - is done
// for sixteen rows at a time, in the order of tiles.
#pragma once

#include "amx_sums.h"

namespace hadron::avx512_amx {
namespace {

constexpr int kLanes = 16;                 // dots of a row side by side: a segment
constexpr int64_t kSegment = kLanes * 32;  // columns
constexpr int64_t kSegmentBytes = kSegment / 2;
constexpr int kWords = 4;  // of 32 bits, that hold the codes of a dot

inline bool is_dealt(const Weight& w) {
    return w.element == Element::e2m1 || w.element == Element::int4;
}

inline int64_t segments(const Weight& w) {
    return (w.columns + kSegment - 1) / kSegment;
}

// Four vectors in the order of memory become vectors that hold one word of each of sixteen dots.
HADRON_LOCAL void deal(const __m512i* from, __m512i* to) {
    const __m512i a = _mm512_unpacklo_epi32(from[0], from[1]), b = _mm512_unpackhi_epi32(from[0], from[1]);
    const __m512i c = _mm512_unpacklo_epi32(from[2], from[3]), d = _mm512_unpackhi_epi32(from[2], from[3]);
    to[0] = _mm512_unpacklo_epi64(a, c), to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d), to[3] = _mm512_unpackhi_epi64(b, d);
}

// The dot that lane `lane` holds then.
constexpr int dot_of_lane(int lane) {
    return lane % 4 * 4 + lane / 4;
}

// Bytes of the activations of one token, dealt alike: [segment][pair of columns][even, odd][lane].
inline int64_t dealt_bytes(const Weight& w) {
    return segments(w) * kSegment * 4;
}

// One of `parts` shares of a prepared row.
inline void deal_activations(const Weight& w, const uint8_t* row, int64_t part, int64_t parts, uint8_t* to) {
    const auto* from = reinterpret_cast<const uint16_t*>(row);
    auto* out = reinterpret_cast<float*>(to);
    for (int64_t s = segments(w) * part / parts; s < segments(w) * (part + 1) / parts; ++s) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t column = s * kSegment + dot_of_lane(lane) * 32;
            for (int k = 0; k < 32; ++k) {
                const bool have = column + k < chunks(w) * kChunk;
                out[s * kSegment + k * kLanes + lane] = have ? bf16_value(from[column + k]) : 0.0f;
            }
        }
    }
}

// Subnormal numbers count as zero as long as this object lives: tiles know no others.
class NoSubnormals {
  public:
    NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~NoSubnormals() { _mm_setcsr(before_); }
    NoSubnormals(const NoSubnormals&) = delete;
    NoSubnormals& operator=(const NoSubnormals&) = delete;

  private:
    unsigned before_;
};

// Rows of one weight with one token. x: dealt. partial: of sixteen rows, a vector for each segment.
template <Span kSpan>
class OneToken {
  public:
    OneToken(const Weight& w, const float* x, float* partial)
        : w_(w), x_(x), partial_(partial), segments_(segments(w)) {
        alignas(64) float values[kLanes];
        for (uint32_t c = 0; c < 16; ++c) values[c] = code_value(w.element, c);
        table_ = _mm512_load_ps(values);
        alignas(64) int32_t dot[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) dot[lane] = dot_of_lane(lane);
        dot_ = _mm512_load_si512(dot);
    }

    void rows(int64_t first, int64_t last, float* y) {
        for (int64_t from = first; from < last; from += kTileRows) {
            const int64_t count = last - from < kTileRows ? last - from : kTileRows;
            {
                const NoSubnormals none;
                int64_t r = 0;
                for (; r + 2 <= count; r += 2) dot_rows<2>(from + r, r);
                for (; r < count; ++r) dot_rows<1>(from + r, r);
            }
            alignas(64) float sums[kTileRows];
            _mm512_store_ps(sums, add_up(from, last, count));
            finish(w_, from, last, sums, 1, true, &y);
        }
    }

  private:
    // Not inlined: compilers do not know that arithmetic depends on the mode that the caller sets.
    template <int kRows>
    __attribute__((noinline)) void dot_rows(int64_t row, int64_t to) const {
        const __m512 table = table_;
        const uint8_t* at = w_.codes + row * w_.row_bytes;
        for (int64_t s = 0; s < segments_; ++s, at += kSegmentBytes) {
            __m512i words[kRows][kWords];
            __m512 scales[kRows][2], even[kRows], odd[kRows];
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* of_row = at + r * w_.row_bytes;
                for (int64_t line = 0; line < kSegmentBytes; line += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(of_row + line + kAheadOfRow), _MM_HINT_T0);
                load_words(of_row, s, words[r]);
                if constexpr (kSpan == Span::c16) load_scales(row + r, s, scales[r]);
                even[r] = odd[r] = _mm512_setzero_ps();
            }
            const float* x = x_ + s * kSegment;
#pragma GCC unroll 16
            for (int k = 0; k < 16; ++k) {
                const __m512 x_even = _mm512_load_ps(x + 32 * k), x_odd = _mm512_load_ps(x + 32 * k + 16);
#pragma GCC unroll 2
                for (int r = 0; r < kRows; ++r) {
                    const Pair pair = values(words[r], scales[r], k, table);
                    even[r] = _mm512_fmadd_ps(pair.even, x_even, even[r]);
                    odd[r] = _mm512_fmadd_ps(pair.odd, x_odd, odd[r]);
                }
            }
            for (int r = 0; r < kRows; ++r)
                _mm512_store_ps(partial_ + ((to + r) * segments_ + s) * kLanes,
                                _mm512_add_ps(even[r], odd[r]));
        }
    }

    struct Pair {
        __m512 even, odd;
    };

    // The k-th pair of columns, where the orders of tiles have them.
    HADRON_LOCAL static Pair values(const __m512i* words, const __m512* scales, int k, __m512 table) {
        const auto nibble = [&](int word, int at) __attribute__((always_inline)) {
            const __m512i v = words[word];
            return _mm512_permutexvar_ps(at == 0 ? v : _mm512_srli_epi32(v, static_cast<unsigned>(4 * at)),
                                         table);  // looks at four bits
        };
        if constexpr (kSpan == Span::c16) {
            return {_mm512_mul_ps(nibble(k % 2, k / 2), scales[0]),
                    _mm512_mul_ps(nibble(2 + k % 2, k / 2), scales[1])};
        } else {
            return {nibble(k % 4, k / 4), nibble(k % 4, 4 + k / 4)};
        }
    }

    HADRON_LOCAL void load_words(const uint8_t* codes, int64_t s, __m512i* words) const {
        __m512i in_order[kWords];
        const int64_t left = (w_.columns - s * kSegment + 1) / 2;
#pragma GCC unroll 4
        for (int i = 0; i < kWords; ++i) {
            in_order[i] =
                left >= kSegmentBytes
                    ? _mm512_loadu_si512(codes + i * 64)
                    : _mm512_maskz_loadu_epi8(left > i * 64 ? first_bytes(left - i * 64) : 0, codes + i * 64);
        }
        deal(in_order, words);
    }

    // Of both groups of each of sixteen dots.
    HADRON_LOCAL void load_scales(int64_t row, int64_t s, __m512* scales) const {
        const int64_t left = (w_.columns + 15) / 16 - s * 2 * kLanes;
        const uint8_t* at = w_.scales + w_.scale_row(row) + s * 2 * kLanes;
        const __mmask32 have = left >= 32 ? ~0u : (1u << left) - 1;
        const __m256i bytes = _mm256_maskz_loadu_epi8(have, at);
        const __m512i both = _mm512_permutexvar_epi32(dot_, _mm512_cvtepu16_epi32(bytes));
        scales[0] = avx512_bf16::e4m3_scales(_mm512_cvtepi32_epi8(both));
        scales[1] = avx512_bf16::e4m3_scales(_mm512_cvtepi32_epi8(_mm512_srli_epi32(both, 8)));
    }

    // Sums of sixteen rows, over their dots in order.
    __m512 add_up(int64_t first, int64_t last, int64_t count) {
        scales_.start(w_, first, last);
        __m512 acc = _mm512_setzero_ps();
        for (int64_t s = 0; s < segments_; ++s) {
            __m512i of_lane[kLanes];
            for (int r = 0; r < kTileRows; ++r) {
                const int64_t at = ((r < count ? r : count - 1) * segments_ + s) * kLanes;
                of_lane[r] = _mm512_load_si512(partial_ + at);
            }
            transpose(of_lane);
            __m512 dots[kLanes];
            for (int lane = 0; lane < kLanes; ++lane)
                dots[dot_of_lane(lane)] = _mm512_castsi512_ps(of_lane[lane]);
            for (int64_t c = 0; c < kLanes / 4; ++c) {
                const int64_t chunk = s * (kLanes / 4) + c;
                if (chunk * kChunk >= w_.columns) break;
                if constexpr (kSpan == Span::chunk || kSpan == Span::c32) scales_.chunk(chunk, unit_);
                acc = add_chunk(acc, dots + c * 4);
            }
        }
        return acc;
    }

    HADRON_LOCAL __m512 add_chunk(__m512 acc, const __m512* dots) const {
        if constexpr (kSpan == Span::c32) {
            for (int i = 0; i < 4; ++i) acc = _mm512_fmadd_ps(dots[i], _mm512_load_ps(unit_.scales[i]), acc);
        } else if constexpr (kSpan == Span::chunk) {
            __m512 sum = dots[0];
            for (int i = 1; i < 4; ++i) sum = _mm512_add_ps(sum, dots[i]);
            acc = _mm512_fmadd_ps(sum, _mm512_load_ps(unit_.scales[0]), acc);
        } else {
            for (int i = 0; i < 4; ++i) acc = _mm512_add_ps(acc, dots[i]);
        }
        return acc;
    }

    static constexpr int64_t kAheadOfRow = 2048;  // bytes that are brought to L1 before their turn

    const Weight& w_;
    const float* x_;
    float* partial_;
    const int64_t segments_;
    __m512 table_;
    __m512i dot_;
    TileScales<kSpan, false> scales_;
    Unit unit_;
};

// Bytes of scratch.
inline int64_t one_bytes(const Weight& w) {
    return kTileRows * segments(w) * kLanes * 4;
}

inline void one_row(const Weight& w, const uint8_t* dealt, int64_t first, int64_t last, float* y,
                    uint8_t* scratch) {
    const auto run = [&]<Span kSpan>() {
        OneToken<kSpan>(w, reinterpret_cast<const float*>(dealt), reinterpret_cast<float*>(scratch))
            .rows(first, last, y);
    };
    switch (span_of(w)) {
        case Span::all:
            return run.template operator()<Span::all>();
        case Span::chunk:
            return run.template operator()<Span::chunk>();
        case Span::c16:
            return run.template operator()<Span::c16>();
        default:
            return run.template operator()<Span::c32>();
    }
}

}  // namespace
}  // namespace hadron::avx512_amx
