// One token: rows are read one after another, as memory likes it, and multiplied in vectors of float32.
//
// The bits are those of tiles. A dot of tiles adds the even and the odd places of its columns up from zero,
// in order, then both (products of bfloat16 are exact in float32). Here sixteen dots of a row lie in lanes,
// so that each step of both sums is one FMA. What comes after a dot - scales, sums over dots - is done for
// sixteen rows at a time, in the order of tiles.
#pragma once

#include "amx_sums.h"

namespace hadron::avx512_amx {
namespace {

constexpr int kLanes = 16;  // dots of a row side by side: a segment

constexpr int columns_of(Span span) {  // of a dot
    return span == Span::c16 ? 16 : 32;
}

// Words of 32 bits that hold the codes of one dot, for codes of so many bits; FP6 is unpacked to 16.
inline int words_of(const Weight& w) {
    const int bits = code_bits(w.element) == 6 ? 16 : code_bits(w.element);
    return columns_of(span_of(w)) * bits / 32;
}

// kWords vectors in the order of memory become vectors that hold one word of each of sixteen dots.
template <int kWords>
HADRON_LOCAL void deal(const __m512i* from, __m512i* to) {
    if constexpr (kWords == 2) {
        const __m512 a = _mm512_castsi512_ps(from[0]), b = _mm512_castsi512_ps(from[1]);
        to[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        to[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
    } else if constexpr (kWords == 4) {
        const __m512i a = _mm512_unpacklo_epi32(from[0], from[1]),
                      b = _mm512_unpackhi_epi32(from[0], from[1]);
        const __m512i c = _mm512_unpacklo_epi32(from[2], from[3]),
                      d = _mm512_unpackhi_epi32(from[2], from[3]);
        to[0] = _mm512_unpacklo_epi64(a, c), to[1] = _mm512_unpackhi_epi64(a, c);
        to[2] = _mm512_unpacklo_epi64(b, d), to[3] = _mm512_unpackhi_epi64(b, d);
    } else if constexpr (kWords == 8) {
        __m512i low[4], high[4];
        deal<4>(from, low), deal<4>(from + 4, high);
        for (int i = 0; i < 4; ++i) {
            to[i] = _mm512_shuffle_i32x4(low[i], high[i], 0x88);
            to[i + 4] = _mm512_shuffle_i32x4(low[i], high[i], 0xdd);
        }
    } else {
        static_assert(kWords == 16);
        for (int i = 0; i < 16; ++i) to[i] = from[i];
        transpose(to);
    }
}

// The dot that lane `lane` holds then.
inline int dot_of_lane(int words, int lane) {
    const int part = lane / 4, i = lane % 4;
    switch (words) {
        case 2:
            return i / 2 * 8 + 2 * part + i % 2;
        case 4:
            return 4 * i + part;
        case 8:
            return part / 2 * 8 + 2 * i + part % 2;
        default:
            return lane;
    }
}

// Bytes of the activations of one token, dealt alike: [segment][pair of columns][even, odd][lane].
inline int64_t dealt_bytes(const Weight& w, int64_t chunks) {
    const int64_t columns = kLanes * columns_of(span_of(w));
    return (chunks * kChunk + columns - 1) / columns * columns * 4;
}

// Segments [first, last) of a prepared row.
inline void deal_activations(const Weight& w, const uint8_t* row, int64_t chunks, int64_t first, int64_t last,
                             uint8_t* to) {
    const int columns = columns_of(span_of(w)), words = words_of(w);
    const auto* from = reinterpret_cast<const uint16_t*>(row);
    auto* out = reinterpret_cast<float*>(to);
    for (int64_t s = first; s < last; ++s) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t column = (s * kLanes + dot_of_lane(words, lane)) * columns;
            for (int k = 0; k < columns; ++k) {
                const bool have = column + k < chunks * kChunk;
                out[(s * columns + k) * kLanes + lane] = have ? bf16_value(from[column + k]) : 0.0f;
            }
        }
    }
}

// Sixteen dots of each of kRows rows: the k-th pair of columns is one step of both sums.
template <int kRows>
struct Dots {
    __m512 even[kRows], odd[kRows];
    HADRON_LOCAL Dots() {
        for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    }
    // weight(r, false), weight(r, true): the even and the odd column of row r.
    template <class Weights>
    HADRON_LOCAL void add(const Weights& weight, const float* x, int k) {
        const __m512 x_even = _mm512_load_ps(x + 32 * k), x_odd = _mm512_load_ps(x + 32 * k + 16);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
            even[r] = _mm512_fmadd_ps(weight(r, false), x_even, even[r]);
            odd[r] = _mm512_fmadd_ps(weight(r, true), x_odd, odd[r]);
        }
    }
    HADRON_LOCAL __m512 sum(int r) const { return _mm512_add_ps(even[r], odd[r]); }
};

// Codes of so many bits that are read where they lie; a row's end is filled up with zeros.
template <int kStored>
struct InPlace {
    static constexpr int kStoredBits = kStored, kBits = kStored;
    HADRON_LOCAL static const uint8_t* segment(const uint8_t* at, int64_t columns, int64_t left,
                                               uint8_t* whole) {
        if (left >= columns) return at;
        std::memset(whole, 0, static_cast<size_t>(columns * kStored / 8));
        std::memcpy(whole, at, static_cast<size_t>((left * kStored + 7) / 8));
        return whole;
    }
};

// FP4 and INT4 in the orders of tiles: pair 4 i + d (of kWords words each) is nibbles i and 4 + i of word d.
struct OneNibbles : InPlace<4> {
    __m512 table;
    explicit OneNibbles(const Weight& w) {
        alignas(64) float values[16];
        for (uint32_t c = 0; c < 16; ++c) values[c] = code_value(w.element, c);
        table = _mm512_load_ps(values);
    }
    template <int kRows, int kWords>
    HADRON_LOCAL void operator()(const __m512i (*words)[kWords], const float* x, __m512* sums) const {
        Dots<kRows> dots;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
            for (int d = 0; d < kWords; ++d) {
                const auto weight = [&](int r, bool odd) {
                    const int shift = 4 * i + (odd ? 16 : 0);
                    const __m512i at = shift == 0
                                           ? words[r][d]
                                           : _mm512_srli_epi32(words[r][d], static_cast<unsigned>(shift));
                    return _mm512_permutexvar_ps(at, table);  // looks at four bits
                };
                dots.add(weight, x, i * kWords + d);
            }
        }
        for (int r = 0; r < kRows; ++r) sums[r] = dots.sum(r);
    }
};

// Bytes in the order of columns. Value::of takes a code in the upper byte of each word.
template <class Value>
struct OneBytes : InPlace<8> {
    explicit OneBytes(const Weight&) {}
    template <int kRows, int kWords>
    HADRON_LOCAL void operator()(const __m512i (*words)[kWords], const float* x, __m512* sums) const {
        const auto run = [&]<bool kUsual>() {
            Dots<kRows> dots;
#pragma GCC unroll 8
            for (int d = 0; d < kWords; ++d) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const auto weight = [&](int r, bool odd) {
                        const int shift = 24 - 16 * half - (odd ? 8 : 0);
                        const __m512i top =
                            shift == 0 ? words[r][d]
                                       : _mm512_slli_epi32(words[r][d], static_cast<unsigned>(shift));
                        return kUsual ? Value::of(top) : Value::any(top);
                    };
                    dots.add(weight, x, 2 * d + half);
                }
            }
            for (int r = 0; r < kRows; ++r) sums[r] = Value::scaled(dots.sum(r));
        };
        bool usual = true;
        for (int r = 0; r < kRows; ++r) usual = usual && Value::usual(words[r], kWords);
        if (usual) return run.template operator()<true>();
        run.template operator()<false>();
        for (int r = 0; r < kRows; ++r) sums[r] = Value::checked(words[r], kWords, sums[r]);
    }
};

struct Int8Value {
    HADRON_LOCAL static bool usual(const __m512i*, int) { return true; }
    HADRON_LOCAL static __m512 of(__m512i top) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)); }
    HADRON_LOCAL static __m512 any(__m512i top) { return of(top); }
    HADRON_LOCAL static __m512 scaled(__m512 sum) { return sum; }
    HADRON_LOCAL static __m512 checked(const __m512i*, int, __m512 sum) { return sum; }
};

// FP8 with an exponent that is 8 too small, which the finished sum makes good.
struct E4m3Value {
    // No zero, subnormal or NaN, so that the bits of a code only have to be moved.
    HADRON_LOCAL static bool usual(const __m512i* words, int count) {
        __mmask64 special = 0;
        for (int i = 0; i < count; ++i) {
            special |= _mm512_testn_epi8_mask(words[i], _mm512_set1_epi8(0x78));
        }
        return (special | nans(words, count)) == 0;
    }
    HADRON_LOCAL static __m512 of(__m512i top) { return moved(top, static_cast<int>(0x87f00000)); }
    // Subnormal m / 8 reads as f = (1 + m / 8) / 2 of the smallest normal number: 2 f - 1 is less than f just
    // there.
    HADRON_LOCAL static __m512 any(__m512i top) {
        const __m512 f = moved(top, 0x07f00000);
        const __m512 value =
            _mm512_min_ps(f, _mm512_fmadd_ps(f, _mm512_set1_ps(2.0f), _mm512_set1_ps(-0x1p-14f)));
        const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000));
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(value), top, sign, 0xf8));
    }
    HADRON_LOCAL static __m512 scaled(__m512 sum) { return _mm512_mul_ps(sum, _mm512_set1_ps(256.0f)); }
    // NaN where a dot has a NaN.
    HADRON_LOCAL static __m512 checked(const __m512i* words, int count, __m512 sum) {
        for (int i = 0; i < count; ++i) {
            const __m512i nan = _mm512_movm_epi8(nans(words + i, 1));
            sum = _mm512_mask_mov_ps(sum, _mm512_test_epi32_mask(nan, nan),
                                     _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
        }
        return sum;
    }

  private:
    HADRON_LOCAL static __m512 moved(__m512i top, int kept) {
        const __m512i exponent = _mm512_set1_epi32(112 << 23);
        return _mm512_castsi512_ps(
            _mm512_ternarylogic_epi32(_mm512_srai_epi32(top, 4), _mm512_set1_epi32(kept), exponent, 0xea));
    }
    HADRON_LOCAL static __mmask64 nans(const __m512i* words, int count) {
        const __m512i nan = _mm512_set1_epi8(0x7f);
        __mmask64 found = 0;
        for (int i = 0; i < count; ++i) found |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(words[i], nan), nan);
        return found;
    }
};

// Pairs of bfloat16.
struct OneWords : InPlace<16> {
    explicit OneWords(const Weight&) {}
    template <int kRows, int kWords>
    HADRON_LOCAL void operator()(const __m512i (*words)[kWords], const float* x, __m512* sums) const {
        Dots<kRows> dots;
#pragma GCC unroll 16
        for (int d = 0; d < kWords; ++d) {
            const auto weight = [&](int r, bool odd) {
                const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
                return _mm512_castsi512_ps(odd ? _mm512_and_si512(words[r][d], upper)
                                               : _mm512_slli_epi32(words[r][d], 16));
            };
            dots.add(weight, x, d);
        }
        for (int r = 0; r < kRows; ++r) sums[r] = dots.sum(r);
    }
};

// FP6, unpacked to such pairs first.
struct OneSixBits : OneWords {
    static constexpr int kStoredBits = 6;
    avx512_bf16::UnpackSixBits<Order::natural> unpack;
    explicit OneSixBits(const Weight& w) : OneWords(w), unpack(w) {}
    HADRON_LOCAL const uint8_t* segment(const uint8_t* at, int64_t columns, int64_t left,
                                        uint8_t* whole) const {
        for (int64_t c = 0; c < columns; c += kChunk, at += unpack.kBytes) {
            __m512i v[4];
            if (left - c >= kChunk) {
                unpack(at, v);
            } else {
                unpack.tail(at, left > c ? left - c : 0, v);
            }
            for (int i = 0; i < 4; ++i) _mm512_store_si512(whole + 2 * c + 64 * i, v[i]);
        }
        return whole;
    }
};

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
template <class Codes, Span kSpan>
class OneToken {
  public:
    static constexpr int64_t kColumns = kLanes * columns_of(kSpan),
                             kStored = kColumns * Codes::kStoredBits / 8;
    static constexpr int kWords = columns_of(kSpan) * Codes::kBits / 32;  // of a dot
    static constexpr int kTogether = kWords <= 8 ? 2 : 1;  // rows for which the registers suffice

    OneToken(const Weight& w, const float* x, float* partial)
        : w_(w), codes_(w), x_(x), partial_(partial), segments_((w.columns + kColumns - 1) / kColumns) {}

    void rows(int64_t first, int64_t last, float* y) {
        for (int64_t from = first; from < last; from += kTileRows) {
            const int64_t count = last - from < kTileRows ? last - from : kTileRows;
            {
                const NoSubnormals none;
                int64_t r = 0;
                for (; r + kTogether <= count; r += kTogether) dot_rows<kTogether>(from + r, r);
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
        alignas(64) uint8_t whole[kRows][kWords * 64];
        const uint8_t* at = w_.codes + row * w_.row_bytes;
        for (int64_t s = 0; s < segments_; ++s, at += kStored) {
            __m512i words[kRows][kWords];
            __m512 sums[kRows];
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                const uint8_t* of_row = at + r * w_.row_bytes;
                for (int64_t line = 0; line < kStored; line += 64) {
                    // Nibbles keep the processor too busy to wait for both.
                    if constexpr (Codes::kStoredBits > 4)
                        _mm_prefetch(reinterpret_cast<const char*>(of_row + line + kFar), _MM_HINT_T1);
                    _mm_prefetch(reinterpret_cast<const char*>(of_row + line + kNear), _MM_HINT_T0);
                }
                const uint8_t* codes = codes_.segment(of_row, kColumns, w_.columns - s * kColumns, whole[r]);
                __m512i in_order[kWords];
#pragma GCC unroll 16
                for (int i = 0; i < kWords; ++i) in_order[i] = _mm512_loadu_si512(codes + i * 64);
                deal<kWords>(in_order, words[r]);
            }
            codes_.template operator()<kRows, kWords>(words, x_ + s * kColumns, sums);
            for (int r = 0; r < kRows; ++r)
                _mm512_store_ps(partial_ + ((to + r) * segments_ + s) * kLanes, sums[r]);
        }
    }

    // Sums of sixteen rows, over their dots in order.
    __m512 add_up(int64_t first, int64_t last, int64_t count) {
        constexpr int kDots = kChunk / columns_of(kSpan);
        scales_.start(w_, first, last, false);
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
                dots[dot_of_lane(kWords, lane)] = _mm512_castsi512_ps(of_lane[lane]);
            for (int64_t c = 0; c < kLanes / kDots; ++c) {
                const int64_t chunk = s * (kLanes / kDots) + c;
                if (chunk * kChunk >= w_.columns) break;
                scales_.chunk(chunk, unit_);
                acc = add_chunk(acc, dots + c * kDots);
            }
        }
        return acc;
    }

    HADRON_LOCAL __m512 add_chunk(__m512 acc, const __m512* dots) const {
        if constexpr (kSpan == Span::all) {
            for (int i = 0; i < 4; ++i) acc = _mm512_add_ps(acc, dots[i]);
        } else if constexpr (kSpan == Span::chunk) {
            __m512 sum = dots[0];
            for (int i = 1; i < 4; ++i) sum = _mm512_add_ps(sum, dots[i]);
            acc = _mm512_fmadd_ps(sum, _mm512_load_ps(unit_.scales[0]), acc);
        } else {
            for (int i = 0; i < scales_of(kSpan); ++i)
                acc = _mm512_fmadd_ps(dots[i], _mm512_load_ps(unit_.scales[i]), acc);
        }
        return acc;
    }

    static constexpr int64_t kNear = 2048, kFar = 8192;  // bytes ahead that are brought to L1 and to L2

    const Weight& w_;
    const Codes codes_;
    const float* x_;
    float* partial_;
    const int64_t segments_;
    TileScales<kSpan> scales_;
    Unit unit_;
};

}  // namespace
}  // namespace hadron::avx512_amx
