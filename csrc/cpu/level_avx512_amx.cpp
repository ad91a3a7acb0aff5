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
// unpacked: only the loops around the unit differ. Scales that fit into the weights go there.
#include <type_traits>
#include <utility>

#include "amx_one.h"
#include "amx_sums.h"
#include "level.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kManyGroups = 32;  // whose sums over all panels stay in L2
constexpr int64_t kAhead = 384;      // bytes of a row that are brought to L1 before their turn
constexpr int64_t kSlice = 2;        // chunks of two groups that stay in L1 for all panels

int order(const Weight& w) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.order(w);
    return 64 + static_cast<int>(order_of(w));
}

int64_t prepared_bytes(const Weight& w) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.prepared_bytes(w);
    return chunks(w) * kChunk * 2;
}

void prepare(const Weight& w, const float* x, uint8_t* prepared) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.prepare(w, x, prepared);
    auto* out = reinterpret_cast<uint16_t*>(prepared);
    for (int64_t c = 0; c < chunks(w); ++c) {
        const int64_t have = w.columns - c * kChunk;
        if (have >= kChunk) {
            avx512_bf16::reorder(order_of(w), x + c * kChunk, out + c * kChunk);
        } else {
            alignas(64) float part[kChunk] = {};
            for (int64_t k = 0; k < have; ++k) part[k] = x[c * kChunk + k];
            avx512_bf16::reorder(order_of(w), part, out + c * kChunk);
        }
    }
}

int64_t packed_bytes(const Weight& w, int64_t tokens) {
    if (span_of(w) == Span::other) return 0;
    if (tokens == 1) return is_dealt(w) ? dealt_bytes(w) : 0;  // one prepared row is a panel
    int64_t bytes = 0;
    for (int64_t t = 0; t < tokens; t += kMostTokens) bytes += Panels::of(tokens - t).bytes(chunks(w));
    return bytes;
}

void pack(const Weight& w, const uint8_t* const* rows, int64_t tokens, int64_t part, int64_t parts,
          uint8_t* packed) {
    const int64_t n = chunks(w);
    if (tokens == 1) return deal_activations(w, rows[0], part, parts, packed);
    for (int64_t t = 0; t < tokens; t += kMostTokens) {
        const Panels panels = Panels::of(tokens - t);
        for (int64_t c = n * part / parts; c < n * (part + 1) / parts; ++c)
            panels.pack(rows + t, tokens - t, c, packed);
        packed += panels.bytes(n);
    }
}

// What a thread works in. sums: [group][panel][16 x 16].
struct Work {
    static constexpr int64_t kUnits = 2 * kSlice;

    static int64_t groups(int64_t panels) { return panels > 1 ? kManyGroups : 1; }
    static int64_t bytes(int64_t panels) {
        return kUnits * static_cast<int64_t>(sizeof(Unit)) + kPartialBytes +
               groups(panels) * panels * kTileBytes;
    }
    explicit Work(uint8_t* at)
        : units(reinterpret_cast<Unit*>(at)),
          partial(at + kUnits * sizeof(Unit)),
          sums(reinterpret_cast<float*>(partial + kPartialBytes)) {
        std::memset(partial, 0, kPartialBytes);  // lanes of tokens that are not there are added too
    }

    Unit* units;
    uint8_t* partial;
    float* sums;
};

template <class Unpack, Span kSpan>
class Rows {
  public:
    Rows(const Weight& w, const Panels& x, const Work& work) : w_(w), unpack_(w), x_(x), work_(work) {}

    // Rows [first, last) with one panel, sixteen at a time: as many streams from memory as a processor
    // follows.
    void few(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        for (int64_t from = first; from < last; from += kTileRows) {
            begin(from, last, 1, 1);
            const Source source(w_, from, last);
            clear_tile<0>();
            if (in_place() && source.last == kTileRows - 1) {
                for (int64_t c = 0; c < chunks(w_); ++c) {
                    dot_chunk<0>(source.codes + c * Unpack::kBytes, 64, w_.row_bytes, x_.chunk(c, 0),
                                 x_.block());
                }
                store_tile<0>(work_.sums, x_.sums_stride());
            } else {
                dot_sixteen(source);
            }
            end(from, last, 1, tokens, y);
        }
    }

    // Rows [first, last) with several panels: what is unpacked serves all of them.
    void many(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        for (int64_t from = first; from < last; from += kManyGroups * kTileRows) {
            const int64_t groups = begin(from, last, kManyGroups, x_.count), n = chunks(w_);
            for (int64_t c = 0; c < n; c += kSlice) {
                const int64_t slice = n - c < kSlice ? n - c : kSlice;
                for (int64_t g = 0; g < groups; g += 2) {
                    const int64_t two = groups - g < 2 ? groups - g : 2;
                    bool whole = true;
                    for (int64_t i = 0; i < two * slice; ++i) {
                        unit(from, last, g + i / slice, c + i % slice, work_.units[i]);
                        whole = whole && plain<kSpan>(work_.units[i]);
                    }
                    for (int64_t p = 0; p < x_.count; ++p) {
                        if (c + slice < n) fetch_panel(x_.chunk(c + slice, p), g / 2);
                        g + 2 < groups ? fetch_rows(from, last, g + 2, c, p)
                                       : fetch_rows(from, last, 0, c + slice, p);
                        if (whole && two == 2) {
                            dot_slice(work_.units, slice, x_.chunk(c, p), x_.stride(), x_.block(), sums(g, p),
                                      sums(g + 1, p));
                            continue;
                        }
                        for (int64_t i = 0; i < two * slice; ++i) {
                            dot_unit<kSpan>(work_.units[i], x_.chunk(c + i % slice, p), x_.block(),
                                            work_.partial, sums(g + i / slice, p));
                        }
                    }
                }
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
        Unit *now = &work_.units[0], *next = &work_.units[1];
        scales_[0].chunk(0, *now);
        for (int part = 0; part < kParts; ++part) unpack_part(source, unpack, 0, part, *now);
        bool held = true;
        for (int64_t c = 0; c < n; ++c, std::swap(now, next)) {
            const bool more = c + 1 < n;
            if (more) scales_[0].chunk(c + 1, *next);
            const auto between = [&](int part) __attribute__((always_inline)) {
                if (!more) return;
                fetch_ahead(source, c + 1, part);
                unpack_part(source, unpack, c + 1, part, *next);
            };
            const bool hold = plain<kSpan>(*now);
            if (hold && !held) load_tile<0>(work_.sums, x_.sums_stride());
            if (!hold && held) store_tile<0>(work_.sums, x_.sums_stride());
            held = hold;
            if (hold) {
                dot_chunk<0>(now->tiles[0], kTileBytes, 64, x_.chunk(c, 0), x_.block(), between);
            } else {
                dot_unit<kSpan>(*now, x_.chunk(c, 0), x_.block(), work_.partial, work_.sums, between);
            }
        }
        if (held) store_tile<0>(work_.sums, x_.sums_stride());
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
            for (int64_t p = 0; p < x_.count; ++p) {
                const int64_t left = tokens - p * kPanel, some = left < kPanel ? left : kPanel;
                finish(w_, from + g * kTileRows, last, sums(g, p), some, x_.width == 1, y + p * kPanel);
            }
        }
    }

    void unit(int64_t from, int64_t last, int64_t group, int64_t c, Unit& to) {
        scales_[group].chunk(c, to);
        const Source source(w_, from + group * kTileRows, last);
        const Unpack unpack = unpack_;
        for (int part = 0; part < kParts; ++part) unpack_part(source, unpack, c, part, to);
    }

    // Whether rows can be multiplied where they lie.
    bool in_place() const {
        return std::is_same_v<Unpack, avx512_bf16::UnpackBf16> && kSpan == Span::all &&
               w_.columns % kChunk == 0;
    }

    // What follows in the sixteen rows is brought to L1; after their end, what follows in the next sixteen.
    HADRON_LOCAL void fetch_ahead(const Source& from, int64_t c, int part) const {
        constexpr int kRows = kTileRows / kParts;
        int64_t ahead = c * Unpack::kBytes + kAhead;
        if (ahead >= from.row_bytes) ahead += (kTileRows - 1) * from.row_bytes;
        const char* at = reinterpret_cast<const char*>(from.codes + part * kRows * from.row_bytes + ahead);
        for (int r = 0; r < kRows; ++r, at += from.row_bytes) {
            for (int line = 0; line < Unpack::kBytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
        }
    }

    // The slice of two groups that is unpacked next, a share of it with each panel.
    void fetch_rows(int64_t from, int64_t last, int64_t group, int64_t c, int64_t panel) const {
        const int64_t share = (2 * kTileRows + x_.count - 1) / x_.count;
        const int64_t first = from + group * kTileRows + panel * share;
        for (int64_t row = first; row < first + share && row < last; ++row) {
            const auto* at =
                reinterpret_cast<const char*>(w_.codes + row * w_.row_bytes + c * Unpack::kBytes);
            for (int64_t line = 0; line < kSlice * Unpack::kBytes; line += 64)
                _mm_prefetch(at + line, _MM_HINT_T1);
        }
    }

    // A piece of the panel's next slice comes from L3 to L2 while one pair of groups is multiplied.
    void fetch_panel(const uint8_t* x, int64_t pair) const {
        constexpr int64_t kLines = 16;
        for (int64_t c = 0; c < kSlice; ++c) {
            for (int64_t i = pair * kLines; i < (pair + 1) * kLines && i < 4 * kPanel; ++i)
                _mm_prefetch(reinterpret_cast<const char*>(x + c * x_.stride() + i * 64), _MM_HINT_T1);
        }
    }

    const Weight& w_;
    const Unpack unpack_;
    const Panels x_;
    const Work work_;
    TileScales<kSpan> scales_[kManyGroups];
};

template <class Unpack, Span kSpan>
void rows_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
             uint8_t* scratch) {
    const uint8_t* packed = x.tokens == 1 ? x.rows[0] : x.packed;
    for (int64_t t = 0; t < x.tokens; t += kMostTokens) {
        const int64_t some = x.tokens - t < kMostTokens ? x.tokens - t : kMostTokens;
        Panels panels = Panels::of(some);
        panels.data = packed;
        packed += panels.bytes(chunks(w));
        const Tiles tiles(static_cast<int>(panels.width));
        Rows<Unpack, kSpan> rows(w, panels, Work(scratch));
        if (panels.count == 1) {
            rows.few(first, last, some, y + t);
        } else {
            rows.many(first, last, some, y + t);
        }
    }
}

template <class Unpack>
void rows_by_span(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                  uint8_t* scratch) {
    switch (span_of(w)) {
        case Span::all:
            return rows_of<Unpack, Span::all>(w, x, first, last, y, scratch);
        case Span::chunk:
            return rows_of<Unpack, Span::chunk>(w, x, first, last, y, scratch);
        default:
            return rows_of<Unpack, Span::c32>(w, x, first, last, y, scratch);
    }
}

void rows(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
          uint8_t* scratch) {
    using namespace avx512_bf16;
    if (x.tokens == 0 || first == last) return;
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.rows(w, x, first, last, y, scratch);
    switch (w.element) {
        case Element::bf16:
            return rows_by_span<UnpackBf16>(w, x, first, last, y, scratch);
        case Element::e4m3:
            return rows_by_span<UnpackE4m3<Order::natural>>(w, x, first, last, y, scratch);
        case Element::int8:
            return rows_by_span<UnpackInt8<Order::natural>>(w, x, first, last, y, scratch);
        case Element::e2m3:
        case Element::e3m2:
            return rows_by_span<UnpackSixBits<Order::natural>>(w, x, first, last, y, scratch);
        default:
            if (x.tokens == 1) return one_row(w, x.packed, first, last, y[0], scratch);
            if (span_of(w) == Span::c16) return rows_of<TileGroups, Span::c16>(w, x, first, last, y, scratch);
            return rows_by_span<TileNibbles>(w, x, first, last, y, scratch);
    }
}

int64_t scratch_bytes(const Weight& w, int64_t tokens) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.scratch_bytes(w, tokens);
    if (tokens == 1 && is_dealt(w)) return one_bytes(w);
    const int64_t panels = ((tokens < kMostTokens ? tokens : kMostTokens) + kPanel - 1) / kPanel;
    return Work::bytes(panels);
}

void gate(const float* g, const float* u, float limit, int64_t n, float* h) {
    avx512_bf16::kKernels.gate(g, u, limit, n, h);
}
void dequantize(const Weight& w, int64_t row, float* out) {
    avx512_bf16::kKernels.dequantize(w, row, out);
}

}  // namespace

const Kernels kKernels = {"avx512_amx", order, prepared_bytes, prepare,      scratch_bytes,
                          rows,         gate,  dequantize,     packed_bytes, pack};

}  // namespace hadron::avx512_amx
