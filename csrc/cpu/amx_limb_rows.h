// Rows of weights in limbs (`amx_limbs.h`) times one panel of tokens, or several.
#pragma once

#include <algorithm>

#include "amx_limbs.h"
#include "amx_sums.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kJoined = 8;  // most tokens whose limbs share a tile

// What a thread works in. sums: [group][panel][16 x 16]; dots: integers on their way to be scaled.
struct LimbWork {
    static constexpr int64_t kDots = 4 * kTileBytes, kKept = 4;

    static int64_t groups(int64_t chunks, int64_t panels) {
        if (panels == 1) return 1;
        return chunks <= most_chunks(panels) ? 2 : kManyGroups;
    }
    static int64_t bytes(int64_t chunks, int64_t panels) {
        return 2 * kMostSteps * static_cast<int64_t>(sizeof(LimbUnit)) + kKept * kDots +
               groups(chunks, panels) * panels * kTileBytes;
    }
    explicit LimbWork(uint8_t* at)
        : units(reinterpret_cast<LimbUnit*>(at)),
          dots(at + 2 * kMostSteps * sizeof(LimbUnit)),
          sums(reinterpret_cast<float*>(dots + kKept * kDots)) {}

    LimbUnit* units;  // [group of two][step]
    uint8_t* dots;
    float* sums;
};

class LimbRows {
  public:
    // scales: of activations, [chunk][panel][16] where there are panels, else [chunk].
    LimbRows(const Weight& w, const Panels& x, const float* scales, const LimbWork& work, bool past_caches)
        : w_(w), x_(x), of_x_(scales), work_(work), past_caches_(past_caches) {}

    // Rows [first, last) with up to sixteen tokens.
    void few(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        for (int64_t from = first; from < last; from += kTileRows) {
            begin(from, last, 1);
            const Source source(w_, from, last);
            x_.width == 1 ? sixteen<true>(source, tokens) : sixteen<false>(source, tokens);
            end(from, last, 1, tokens, y);
        }
    }

    // Rows [first, last) with several panels, two times sixteen at a time, as `Rows::many`.
    void many(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        const int64_t n = chunks(w_), part = most_chunks(x_.count), most = LimbWork::groups(n, x_.count);
        for (int64_t from = first; from < last; from += most * kTileRows) {
            const int64_t groups = begin(from, last, most);
            for (int64_t c = 0; c < n; c += part) {
                for (int64_t g = 0; g < groups; g += 2)
                    two_groups(from, last, g, std::min<int64_t>(2, groups - g), c, std::min(n, c + part));
            }
            end(from, last, groups, tokens, y);
        }
    }

  private:
    static constexpr int64_t kKept = LimbWork::kKept;

    // A step is unpacked while the one before it is multiplied, and scaled two steps later, when its dots
    // have arrived in memory.
    template <bool kOne>
    __attribute__((noinline)) void sixteen(const Source& source, int64_t tokens) {
        const int64_t n = chunks(w_);
        const LimbTables& tables = tables_;
        LimbSteps& steps = steps_[0];
        LimbStep kept[kKept];
        __m512 sum = _mm512_setzero_ps();  // of one token
        const auto scale = [&](int64_t i) __attribute__((always_inline)) {
            const LimbStep& step = kept[i % kKept];
            if constexpr (kOne) {
                sum = _mm512_fmadd_ps(one_token(step, dots(i)), _mm512_load_ps(step.scales), sum);
            } else {
                const __m512 by = _mm512_loadu_ps(of_x_ + step.chunk * kPanel);
                scale_panel(step, dots(i), tokens, by, sums(0, 0));
            }
        };
        int64_t c = 0, count = 0;
        steps.next(c, kept[0]);
        for (int part = 0; part < 2; ++part) unpack_limbs(source, tables, kept[0], part, work_.units[0]);
        for (bool more = true; more; ++count) {
            if (!steps.more()) ++c;
            more = c < n;
            LimbStep& next = kept[(count + 1) % kKept];
            LimbUnit& following = work_.units[(count + 1) % 2];
            const auto between = [&](int part) __attribute__((always_inline)) {
                if (!more) return;
                if (part == 0) steps.next(c, next), fetch_ahead(source, c);
                unpack_limbs(source, tables, next, part, following);
            };
            dot_few<kOne>(work_.units[count % 2], kept[count % kKept].chunk, dots(count), between);
            if (count >= 2) scale(count - 2);
        }
        for (int64_t i = std::max<int64_t>(0, count - 2); i < count; ++i) scale(i);
        if constexpr (kOne) _mm512_store_ps(sums(0, 0), sum);
    }

    float* sums(int64_t group, int64_t panel) const { return work_.sums + (group * x_.count + panel) * 256; }
    uint8_t* dots(int64_t i) const { return work_.dots + i % kKept * LimbWork::kDots; }
    bool joined() const { return x_.width <= kJoined; }

    int64_t begin(int64_t from, int64_t last, int64_t most) {
        const int64_t groups = std::min(most, (last - from + kTileRows - 1) / kTileRows);
        for (int64_t g = 0; g < groups; ++g) steps_[g].start(w_, from + g * kTileRows, last);
        std::memset(work_.sums, 0, static_cast<size_t>(groups * x_.count * kTileBytes));
        return groups;
    }

    void end(int64_t from, int64_t last, int64_t groups, int64_t tokens, float* const* y) {
        for (int64_t g = 0; g < groups; ++g) {
            const Finish finish(w_, from + g * kTileRows, last);
            for (int64_t p = 0; p < x_.count; ++p) {
                finish.write(sums(g, p), std::min(kPanel, tokens - p * kPanel), x_.width == 1, past_caches_,
                             y + p * kPanel);
            }
        }
    }

    // Rows of a tile of limbs are groups of four columns: high limbs of the tokens, then low ones.
    HADRON_LOCAL const uint8_t* limbs(int64_t c, int64_t panel, int half) const {
        return x_.chunk(c, panel) + half * 2 * x_.block();
    }

    template <bool kOne, class Between>
    HADRON_LOCAL void dot_few(const LimbUnit& unit, int64_t c, uint8_t* to, const Between& between) const {
        const int64_t stride = x_.block() / 8, low = x_.width * 4;
        if (kOne || joined()) {
            clear_tile<0>();
            load_tile<4>(unit.tiles[0], 64), load_tile<6>(limbs(c, 0, 0), stride), dot_bytes<0, 4, 6>();
            between(0);
            load_tile<5>(unit.tiles[1], 64), load_tile<7>(limbs(c, 0, 1), stride), dot_bytes<0, 5, 7>();
            between(1);
            return store_tile<0>(to, stride);
        }
        clear_tile<0>(), clear_tile<1>();
        load_tile<4>(unit.tiles[0], 64), load_tile<6>(limbs(c, 0, 0), stride), dot_bytes<0, 4, 6>();
        load_tile<7>(limbs(c, 0, 0) + low, stride), dot_bytes<1, 4, 7>();
        between(0);
        load_tile<5>(unit.tiles[1], 64), load_tile<6>(limbs(c, 0, 1), stride), dot_bytes<0, 5, 6>();
        load_tile<7>(limbs(c, 0, 1) + low, stride), dot_bytes<1, 5, 7>();
        between(1);
        store_tile<0>(to, stride), store_tile<1>(to + low, stride);
    }

    // Dots of a step with one token, [row][high, low], times the scale of its activations.
    HADRON_LOCAL __m512 one_token(const LimbStep& step, const uint8_t* from) const {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i a = _mm512_load_si512(from), b = _mm512_load_si512(from + 64);
        const __m512i high = _mm512_permutex2var_epi32(a, even, b);
        const __m512i low = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
        return _mm512_mul_ps(whole(high, low), _mm512_set1_ps(of_x_[step.chunk]));
    }

    // Rows of `width` high limbs and as many low ones; kWidth: the same, where it is known.
    template <int64_t kWidth = 0>
    HADRON_LOCAL void scale_panel(const LimbStep& step, const uint8_t* from, int64_t width, __m512 by,
                                  float* to) const {
        const int64_t n = kWidth ? kWidth : width;
        const auto lanes = static_cast<__mmask16>((1u << n) - 1);
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
            const uint8_t* row = from + r * 8 * n;
            const __m512i high = _mm512_maskz_loadu_epi32(lanes, row),
                          low = _mm512_maskz_loadu_epi32(lanes, row + 4 * n);
            const __m512 sum = _mm512_mul_ps(whole(high, low), by);
            _mm512_store_ps(to + r * 16, _mm512_fmadd_ps(sum, _mm512_set1_ps(step.scales[r]),
                                                         _mm512_load_ps(to + r * 16)));
        }
    }

    HADRON_LOCAL static __m512 whole(__m512i high, __m512i low) {
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    }

    // Sums of all panels += chunks [begin, end) of `two` groups (or one) times them.
    void two_groups(int64_t from, int64_t last, int64_t g, int64_t two, int64_t begin, int64_t end) {
        const int64_t row = from + g * kTileRows;
        const Source sources[2] = {{w_, row, last}, {w_, row + (two - 1) * kTileRows, last}};
        for (int64_t c = begin; c < end; ++c) {
            LimbStep steps[2][kMostSteps];
            int64_t counts[2] = {};
            for (int64_t j = 0; j < two; ++j) {
                do {
                    LimbStep& step = steps[j][counts[j]];
                    steps_[g + j].next(c, step);
                    for (int part = 0; part < 2; ++part)
                        unpack_limbs(sources[j], tables_, step, part, unit(j, counts[j]));
                    ++counts[j];
                } while (steps_[g + j].more());
                fetch_ahead(sources[j], c);
            }
            const int64_t together = two == 2 ? std::min(counts[0], counts[1]) : 0;
            for (int64_t i = 0; i < together; ++i)
                pair(g, c, steps[0][i], steps[1][i], unit(0, i), unit(1, i));
            for (int64_t j = 0; j < two; ++j) {
                for (int64_t i = together; i < counts[j]; ++i) single(g + j, c, steps[j][i], unit(j, i));
            }
        }
    }
    LimbUnit& unit(int64_t group, int64_t step) const { return work_.units[group * kMostSteps + step]; }

    // A step of two groups times all panels. Dots of one panel are scaled while those of the next are under
    // way.
    void pair(int64_t g, int64_t c, const LimbStep& one, const LimbStep& other, const LimbUnit& a,
              const LimbUnit& b) const {
        const auto scale = [&](int64_t p) __attribute__((always_inline)) {
            const __m512 by = _mm512_loadu_ps(of_x_ + (c * x_.count + p) * kPanel);
            scale_panel<kPanel>(one, dots(p), kPanel, by, sums(g, p));
            scale_panel<kPanel>(other, dots(p) + 2 * kTileBytes, kPanel, by, sums(g + 1, p));
        };
        for (int64_t p = 0; p < x_.count; ++p) {
            clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const uint8_t* x = limbs(c, p, half);
                load_tile<4>(a.tiles[half], 64), load_tile<6>(x, 128), dot_bytes<0, 4, 6>();
                load_tile<7>(x + 64, 128), dot_bytes<1, 4, 7>();
                load_tile<5>(b.tiles[half], 64), dot_bytes<2, 5, 6>(), dot_bytes<3, 5, 7>();
            }
            uint8_t* to = dots(p);
            store_tile<0>(to, 128), store_tile<1>(to + 64, 128);
            store_tile<2>(to + 2 * kTileBytes, 128), store_tile<3>(to + 2 * kTileBytes + 64, 128);
            if (p > 0) scale(p - 1);
        }
        scale(x_.count - 1);
    }

    void single(int64_t g, int64_t c, const LimbStep& step, const LimbUnit& a) const {
        for (int64_t p = 0; p < x_.count; ++p) {
            clear_tile<0>(), clear_tile<1>();
            for (int half = 0; half < 2; ++half) {
                const uint8_t* x = limbs(c, p, half);
                load_tile<4>(a.tiles[half], 64), load_tile<6>(x, 128), dot_bytes<0, 4, 6>();
                load_tile<7>(x + 64, 128), dot_bytes<1, 4, 7>();
            }
            store_tile<0>(dots(0), 128), store_tile<1>(dots(0) + 64, 128);
            const __m512 by = _mm512_loadu_ps(of_x_ + (c * x_.count + p) * kPanel);
            scale_panel<kPanel>(step, dots(0), kPanel, by, sums(g, p));
        }
    }

    // What follows in the sixteen rows is brought to L2; after their end, what follows in the next.
    HADRON_LOCAL void fetch_ahead(const Source& from, int64_t c) const {
        int64_t ahead = c * 64 + kAhead;
        if (ahead >= w_.row_bytes) ahead += (kTileRows - 1) * w_.row_bytes;
        for (const uint8_t* row : from.rows)
            _mm_prefetch(reinterpret_cast<const char*>(row + ahead), _MM_HINT_T1);
    }

    const Weight& w_;
    const Panels x_;
    const float* const of_x_;
    const LimbWork work_;
    const bool past_caches_;
    const LimbTables& tables_ = LimbTables::get();
    LimbSteps steps_[kManyGroups];
};

}  // namespace
}  // namespace hadron::avx512_amx
