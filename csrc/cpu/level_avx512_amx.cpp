// The level `avx512_amx` (avx512_bf16 and AMX tiles): sixteen rows of a weight, unpacked, times up to sixteen
// tokens at once. What tiles do not take, `avx512_bf16` multiplies.
//
// The work is cut into units of sixteen rows by a chunk of 128 columns. Sums of an element always run the
// same way: dots of tiles in the order of columns, over all of them or from zero to where a scale comes in;
// there
//
//     acc = dots * scale + acc
//
// by float32 FMA. So one token streams weights from memory with the same bits as five hundred share what is
// unpacked: only the loops around the unit differ. Scales that fit into the weights go there. MXFP4 has a way
// of its own (`amx_limbs.h`).
#include <type_traits>
#include <utility>

#include "amx_codes.h"
#include "amx_limb_rows.h"
#include "amx_sums.h"
#include "level.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kSlice = 2;         // chunks of two groups that stay in L1 for all panels
constexpr int64_t kCached = 1 << 20;  // bytes of results that may take room in L2

int order(const Weight& w) {
    if (takes_limbs(w)) return kLimbOrder;
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.order(w);
    return 64 + static_cast<int>(order_of(w));
}

int64_t prepared_bytes(const Weight& w) {
    if (takes_limbs(w)) return limb_bytes(chunks(w));
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.prepared_bytes(w);
    return chunks(w) * kChunk * 2;
}

void prepare(const Weight& w, const float* x, uint8_t* prepared) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.prepare(w, x, prepared);
    auto* out = reinterpret_cast<uint16_t*>(prepared);
    auto* scales = reinterpret_cast<float*>(prepared + chunks(w) * kChunk * 2);
    const bool limbs = takes_limbs(w);
    for (int64_t c = 0; c < chunks(w); ++c) {
        const int64_t have = w.columns - c * kChunk;
        const float* from = x + c * kChunk;
        alignas(64) float part[kChunk];
        if (have < kChunk) {
            std::memset(part, 0, sizeof part);
            from = static_cast<float*>(std::memcpy(part, from, static_cast<size_t>(have) * sizeof(float)));
        }
        if (limbs) {
            scales[c] = prepare_limbs(from, prepared + c * kChunk * 2);
        } else {
            avx512_bf16::reorder(order_of(w), from, out + c * kChunk);
        }
    }
}

// Bytes of panels over so many chunks; limbs have their scales behind them: [chunk][panel][16].
int64_t panel_bytes(const Weight& w, const Panels& panels) {
    return panels.bytes(chunks(w)) + (takes_limbs(w) ? chunks(w) * panels.count * kPanel * 4 : 0);
}

// f(first token, panels) for the parts of so many tokens that are multiplied one after the other.
template <class F>
void each_part(const Weight& w, int64_t tokens, F f) {
    const int64_t most = most_tokens(chunks(w));
    for (int64_t t = 0; t < tokens; t += most) f(t, Panels::of(tokens - t < most ? tokens - t : most));
}

int64_t packed_bytes(const Weight& w, int64_t tokens) {
    if (span_of(w) == Span::other) return 0;
    if (tokens == 1) return 0;  // one prepared row is a panel
    int64_t bytes = 0;
    each_part(w, tokens, [&](int64_t, const Panels& panels) { bytes += panel_bytes(w, panels); });
    return bytes;
}

void pack(const Weight& w, const uint8_t* const* rows, int64_t tokens, int64_t part, int64_t parts,
          uint8_t* packed) {
    const int64_t n = chunks(w);
    each_part(w, tokens, [&](int64_t t, const Panels& panels) {
        auto* scales = reinterpret_cast<float*>(packed + panels.bytes(n));
        for (int64_t c = n * part / parts; c < n * (part + 1) / parts; ++c) {
            panels.pack(rows + t, tokens - t, c, packed);
            if (!takes_limbs(w)) continue;
            for (int64_t i = 0; i < panels.count * kPanel; ++i)
                scales[c * panels.count * kPanel + i] =
                    i < tokens - t ? limb_scales(rows[t + i], n)[c] : 0.0f;
        }
        packed += panel_bytes(w, panels);
    });
}

// What a thread works in. sums: [group][panel][16 x 16].
struct Work {
    // Of rows whose sums are held.
    static int64_t groups(int64_t chunks, int64_t panels) {
        if (panels == 1) return 1;
        return chunks <= most_chunks(panels) ? 2 : kManyGroups;
    }
    static int64_t bytes(int64_t chunks, int64_t panels) {
        return kSlice * static_cast<int64_t>(sizeof(*units)) + kPartialBytes +
               groups(chunks, panels) * panels * kTileBytes;
    }
    explicit Work(uint8_t* at)
        : units(reinterpret_cast<Unit (*)[2]>(at)),
          partial(at + kSlice * sizeof(*units)),
          sums(reinterpret_cast<float*>(partial + kPartialBytes)) {
        std::memset(partial, 0, kPartialBytes);  // lanes of tokens that are not there are added too
    }

    Unit (*units)[2];  // [chunk][group]
    uint8_t* partial;
    float* sums;
};

template <class Unpack, Span kSpan>
class Rows {
  public:
    Rows(const Weight& w, const Panels& x, const Work& work, bool past_caches)
        : w_(w), unpack_(w), x_(x), work_(work), past_caches_(past_caches) {}

    // Rows [first, last) with one panel, sixteen at a time: as many streams from memory as a processor
    // follows.
    void few(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        for (int64_t from = first; from < last; from += kTileRows) {
            begin(from, last, 1, 1);
            const Source source(w_, from, last);
            clear_tile<0>();
            if (in_place() && source.whole) {
                for (int64_t c = 0; c < chunks(w_); ++c) {
                    if (c % 4 == 0) keep_stores_awake(work_.partial);
                    dot_chunk<0>(source.rows[0] + c * Unpack::kBytes, 64, w_.row_bytes, x_.chunk(c, 0),
                                 x_.block());
                }
                store_tile<0>(work_.sums, x_.sums_stride());
            } else {
                dot_sixteen(source);
            }
            end(from, last, 1, tokens, y);
        }
    }

    // Rows [first, last) with several panels, two times sixteen at a time: what is unpacked serves all
    // panels, which come from L2 for every 32 rows. Where they are too wide for that, a part of their columns
    // serves kManyGroups of rows before the next.
    void many(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        const int64_t n = chunks(w_), part = most_chunks(x_.count), most = Work::groups(n, x_.count);
        for (int64_t from = first; from < last; from += most * kTileRows) {
            const int64_t groups = begin(from, last, most, x_.count);
            for (int64_t c = 0; c < n; c += part) {
                for (int64_t g = 0; g < groups; g += 2)
                    two_groups(from, last, g, groups - g < 2 ? 1 : 2, c, n - c < part ? n : c + part);
            }
            end(from, last, groups, tokens, y);
        }
    }

  private:
    float* sums(int64_t group, int64_t panel) const { return work_.sums + (group * x_.count + panel) * 256; }

    // Unpacking a unit overlaps the dots of the one before it. Sums stay in register 0 until a scale comes
    // in.
    void dot_sixteen(const Source& source) {
        const Unpack unpack = unpack_;  // in registers
        const int64_t n = chunks(w_);
        Unit *now = &work_.units[0][0], *next = &work_.units[0][1];
        scales_[0].chunk(0, *now);
        for (int part = 0; part < kParts; ++part) unpack_part(source, unpack, 0, part, *now);
        for (int64_t c = 0; c < n; ++c, std::swap(now, next)) {
            const bool more = c + 1 < n;
            if (more) scales_[0].chunk(c + 1, *next);
            const auto between = [&](int part) __attribute__((always_inline)) {
                if (!more) return;
                fetch_ahead(source, c + 1, part);
                unpack_part(source, unpack, c + 1, part, *next);
            };
            if constexpr (kPlain<kSpan>) {
                if (c % 4 == 0) keep_stores_awake(work_.partial);
                dot_chunk<0>(now->tiles[0], kTileBytes, 64, x_.chunk(c, 0), x_.block(), between);
            } else {
                dot_unit<kSpan>(*now, x_.chunk(c, 0), x_.block(), work_.partial, work_.sums, between);
            }
        }
        if constexpr (kPlain<kSpan>) store_tile<0>(work_.sums, x_.sums_stride());
    }

    // Clears sums and finds the scales of up to `most` groups of rows; the number of groups.
    int64_t begin(int64_t from, int64_t last, int64_t most, int64_t panels) {
        const int64_t left = (last - from + kTileRows - 1) / kTileRows, groups = left < most ? left : most;
        for (int64_t g = 0; g < groups; ++g) scales_[g].start(w_, from + g * kTileRows, last);
        std::memset(work_.sums, 0, static_cast<size_t>(groups * panels * kTileBytes));
        return groups;
    }

    void end(int64_t from, int64_t last, int64_t groups, int64_t tokens, float* const* y) {
        for (int64_t g = 0; g < groups; ++g) {
            const Finish finish(w_, from + g * kTileRows, last);
            for (int64_t p = 0; p < x_.count; ++p) {
                const int64_t left = tokens - p * kPanel, some = left < kPanel ? left : kPanel;
                finish.write(sums(g, p), some, x_.width == 1, past_caches_, y + p * kPanel);
            }
        }
    }

    void unit(const Source& source, int64_t group, int64_t c, Unit& to) {
        scales_[group].chunk(c, to);
        const Unpack unpack = unpack_;
        for (int part = 0; part < kParts; ++part) unpack_part(source, unpack, c, part, to);
    }

    // Sums of all panels += chunks [begin, end) of `two` groups (or one) times them.
    void two_groups(int64_t from, int64_t last, int64_t g, int64_t two, int64_t begin, int64_t end) {
        const int64_t row = from + g * kTileRows;
        const Source sources[2] = {{w_, row, last}, {w_, row + (two - 1) * kTileRows, last}};
        for (int64_t c = begin; c < end; c += kSlice) {
            const int64_t slice = end - c < kSlice ? end - c : kSlice;
            const bool whole = kPlain<kSpan> && two == 2;
            for (int64_t i = 0; i < slice; ++i) {
                for (int64_t j = 0; j < two; ++j) {
                    unit(sources[j], g + j, c + i, work_.units[i][j]);
                    keep_stores_awake(work_.partial);
                }
            }
            for (int64_t p = 0; p < x_.count; p += 2) {
                fetch_rows(sources, p, c, begin, end);
                panels(p, x_.count - p < 2 ? 1 : 2, g, two, c, slice, whole);
            }
        }
    }

    // Sums of panel p, and of the next where there are two, += the units of a slice times them.
    void panels(int64_t p, int64_t two_panels, int64_t g, int64_t two_groups, int64_t c, int64_t slice,
                bool whole) const {
        const int64_t apart = x_.count * 256;
        if (whole && two_panels == 2)
            return dot_slice<2>(work_.units, slice, x_.chunk(c, p), x_.stride(), sums(g, p), apart);
        if (whole) return dot_slice<1>(work_.units, slice, x_.chunk(c, p), x_.stride(), sums(g, p), apart);
        for (int64_t i = 0; i < slice; ++i) {
            if (kSpan == Span::chunk && two_groups == 2 && two_panels == 2) {
                dot_scaled_four(work_.units[i], x_.chunk(c + i, p), work_.partial, sums(g, p), apart);
                continue;
            }
            for (int64_t j = 0; j < two_groups; ++j) {
                for (int64_t q = p; q < p + two_panels; ++q)
                    dot_unit<kSpan>(work_.units[i][j], x_.chunk(c + i, q), x_.block(), work_.partial,
                                    sums(g + j, q));
            }
        }
    }

    // Whether rows can be multiplied where they lie.
    bool in_place() const {
        return std::is_same_v<Unpack, avx512_bf16::UnpackBf16> && kSpan == Span::all &&
               w_.columns % kChunk == 0;
    }

    // What follows in the sixteen rows is brought to L2 (L1 has too few requests under way); after their end,
    // what follows in the next sixteen.
    HADRON_LOCAL void fetch_ahead(const Source& from, int64_t c, int part) const {
        constexpr int kRows = kTileRows / kParts;
        int64_t ahead = c * Unpack::kBytes + kAhead;
        if (ahead >= w_.row_bytes) ahead += (kTileRows - 1) * w_.row_bytes;
        for (int r = part * kRows; r < (part + 1) * kRows; ++r) {
            const char* at = reinterpret_cast<const char*>(from.rows[r] + ahead);
            for (int line = 0; line < Unpack::kBytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
        }
    }

    // What follows in 32 rows is brought to L2, a share of it with every two panels; after the end of their
    // part, what follows in the next 32.
    void fetch_rows(const Source* sources, int64_t panel, int64_t c, int64_t begin, int64_t end) const {
        const int64_t share = (2 * kTileRows * 2 + x_.count - 1) / x_.count, from = panel / 2 * share;
        int64_t ahead = c * Unpack::kBytes + kAhead;
        if (ahead >= end * Unpack::kBytes)
            ahead += 2 * kTileRows * w_.row_bytes - (end - begin) * Unpack::kBytes;
        for (int64_t row = from; row < from + share && row < 2 * kTileRows; ++row) {
            const auto* at =
                reinterpret_cast<const char*>(sources[row / kTileRows].rows[row % kTileRows] + ahead);
            for (int64_t line = 0; line < kSlice * Unpack::kBytes; line += 64)
                _mm_prefetch(at + line, _MM_HINT_T1);
        }
    }

    const Weight& w_;
    const Unpack unpack_;
    const Panels x_;
    const Work work_;
    const bool past_caches_;
    TileScales<kSpan> scales_[kManyGroups];
};

// make(panels, past_caches): what multiplies rows by panels. joined: most tokens that take two columns of a
// tile.
template <class Make>
void rows_by_parts(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                   int64_t joined, const Make& make) {
    const uint8_t* packed = x.tokens == 1 ? x.rows[0] : x.packed;
    const bool past_caches = x.tokens * w.rows * static_cast<int64_t>(sizeof(float)) > kCached;
    each_part(w, x.tokens, [&](int64_t t, Panels panels) {
        panels.data = packed;
        packed += panel_bytes(w, panels);
        const Tiles tiles(static_cast<int>(panels.width <= joined ? 2 * panels.width : panels.width));
        auto rows = make(panels, past_caches);
        const int64_t left = x.tokens - t, most = panels.count * kPanel, some = left < most ? left : most;
        if (panels.count == 1) {
            rows.few(first, last, some, y + t);
        } else {
            rows.many(first, last, some, y + t);
        }
    });
    if (past_caches) _mm_sfence();  // before another thread is told that they are there
}

template <class Unpack, Span kSpan>
void rows_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
             uint8_t* scratch) {
    rows_by_parts(w, x, first, last, y, 0, [&](const Panels& panels, bool past_caches) {
        return Rows<Unpack, kSpan>(w, panels, Work(scratch), past_caches);
    });
}

void rows_of_limbs(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                   uint8_t* scratch) {
    rows_by_parts(w, x, first, last, y, kJoined, [&](const Panels& panels, bool past_caches) {
        return LimbRows(w, panels, reinterpret_cast<const float*>(panels.data + panels.bytes(chunks(w))),
                        LimbWork(scratch), past_caches);
    });
}

// Unpack: what unpacks weights whose sums end at a span.
template <template <Span> class Unpack>
void rows_by_span(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                  uint8_t* scratch) {
    switch (span_of(w)) {
        case Span::all:
            return rows_of<Unpack<Span::all>, Span::all>(w, x, first, last, y, scratch);
        case Span::chunk:
            return rows_of<Unpack<Span::chunk>, Span::chunk>(w, x, first, last, y, scratch);
        case Span::c16:
            return rows_of<TileNibbles<Span::c16>, Span::c16>(w, x, first, last, y, scratch);
        default:
            return rows_of<Unpack<Span::c32>, Span::c32>(w, x, first, last, y, scratch);
    }
}

template <Span>
using Bf16 = avx512_bf16::UnpackBf16;
template <Span kSpan>
using E4m3 = TileE4m3<kSpan == Span::c32 ? Order::natural : Order::bytes>;
template <Span>
using Int8 = TileInt8;
template <Span>
using SixBits = avx512_bf16::UnpackSixBits<Order::natural>;

void rows(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
          uint8_t* scratch) {
    if (x.tokens == 0 || first == last) return;
    if (takes_limbs(w)) return rows_of_limbs(w, x, first, last, y, scratch);
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.rows(w, x, first, last, y, scratch);
    switch (w.element) {
        case Element::bf16:
            return rows_by_span<Bf16>(w, x, first, last, y, scratch);
        case Element::e4m3:
            return rows_by_span<E4m3>(w, x, first, last, y, scratch);
        case Element::int8:
            return rows_by_span<Int8>(w, x, first, last, y, scratch);
        case Element::e2m3:
        case Element::e3m2:
            return rows_by_span<SixBits>(w, x, first, last, y, scratch);
        default:
            return rows_by_span<TileNibbles>(w, x, first, last, y, scratch);
    }
}

int64_t scratch_bytes(const Weight& w, int64_t tokens) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.scratch_bytes(w, tokens);
    const int64_t most = most_tokens(chunks(w)),
                  panels = ((tokens < most ? tokens : most) + kPanel - 1) / kPanel;
    return takes_limbs(w) ? LimbWork::bytes(chunks(w), panels) : Work::bytes(chunks(w), panels);
}

void gate(const float* g, const float* u, float limit, int64_t n, float* h) {
    avx512_bf16::kKernels.gate(g, u, limit, n, h);
}
void dequantize(const Weight& w, int64_t row, float* out) {
    avx512_bf16::kKernels.dequantize(w, row, out);
}

}  // namespace

constinit const Kernels kKernels = {"avx512_amx", order, prepared_bytes, prepare,      scratch_bytes,
                                    rows,         gate,  dequantize,     packed_bytes, pack};

}  // namespace hadron::avx512_amx
