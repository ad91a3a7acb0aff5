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
// unpacked: only the loops around the unit differ.
#include "amx_one.h"
#include "amx_sums.h"
#include "level.h"

namespace hadron::avx512_amx {
namespace {

constexpr int64_t kFewGroups = 4;    // groups of sixteen rows that share a chunk of one panel in L1
constexpr int64_t kManyGroups = 32;  // whose sums over all panels stay in L2
constexpr int64_t kAhead = 4;        // chunks
constexpr int64_t kSlice = 2;        // chunks of two groups that stay in L1 for all panels

int64_t chunks(const Weight& w) {
    return (w.columns + kChunk - 1) / kChunk;
}

int order(const Weight& w) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.order(w);
    const int one = words_of(w) + (span_of(w) == Span::c16 ? 32 : 0);  // how one token is dealt
    return 64 * (1 + one) + static_cast<int>(order_of(w));
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
    if (tokens == 1) return dealt_bytes(w, chunks(w));
    int64_t bytes = 0;
    for (int64_t t = 0; t < tokens; t += kMostTokens) bytes += Panels::of(tokens - t).bytes(chunks(w));
    return bytes;
}

void pack(const Weight& w, const uint8_t* const* rows, int64_t tokens, int64_t part, int64_t parts,
          uint8_t* packed) {
    const int64_t n = chunks(w);
    if (tokens == 1) {
        const int64_t segments = dealt_bytes(w, n) / 4 / kLanes / columns_of(span_of(w));
        return deal_activations(w, rows[0], n, segments * part / parts, segments * (part + 1) / parts,
                                packed);
    }
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

    static int64_t groups(int64_t panels) { return panels > 1 ? kManyGroups : kFewGroups; }
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

    // Rows [first, last) with one panel: unpacking a unit overlaps the dots of the one before it. Sums stay
    // in their registers until a scale comes in.
    void few(int64_t first, int64_t last, int64_t tokens, float* const* y) {
        for (int64_t from = first; from < last; from += kFewGroups * kTileRows) {
            const int64_t groups = begin(from, last, kFewGroups, 1), count = chunks(w_) * groups;
            bool held = kSpan == Span::all || kSpan == Span::c32;
            if (held) load_sums();
            unit(from, last, 0, 0, work_.units[0]);
            for (int64_t i = 0; i < count; ++i) {
                if (from == first) fetch_along(from + i % groups * kTileRows, last, i / groups + kAhead);
                fetch(from + groups * kTileRows, last, i);
                const int64_t next = i + 1;
                if (next < count) unit(from, last, next % groups, next / groups, work_.units[next % 2]);
                const Unit& now = work_.units[i % 2];
                const uint8_t* x = x_.chunk(i / groups, 0);
                const bool plain = kSpan == Span::all || now.folded;
                if (held && !plain) store_sums();
                if (!held && plain) load_sums();
                held = plain;
                if (plain) {
                    dot_chunk_into(i % groups, now, x, x_.block());
                } else {
                    dot_unit<kSpan>(now, x, x_.block(), work_.partial, sums(i % groups, 0));
                }
            }
            if (held) store_sums();
            end(from, last, groups, tokens, y);
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
                    bool plain = kSpan == Span::all || kSpan == Span::c32;
                    for (int64_t i = 0; i < two * slice; ++i) {
                        unit(from, last, g + i / slice, c + i % slice, work_.units[i]);
                        plain = plain && (kSpan == Span::all || work_.units[i].folded);
                    }
                    for (int64_t p = 0; p < x_.count; ++p) {
                        if (c + slice < n) fetch_panel(x_.chunk(c + slice, p), g / 2);
                        g + 2 < groups ? fetch_rows(from, last, g + 2, c, p)
                                       : fetch_rows(from, last, 0, c + slice, p);
                        if (plain && two == 2) {
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

    // Sums of the groups of `few`, to and from registers 0 to 3.
    void load_sums() const {
        load_tile<0>(sums(0, 0), 64), load_tile<1>(sums(1, 0), 64);
        load_tile<2>(sums(2, 0), 64), load_tile<3>(sums(3, 0), 64);
    }
    void store_sums() const {
        store_tile<0>(sums(0, 0), 64), store_tile<1>(sums(1, 0), 64);
        store_tile<2>(sums(2, 0), 64), store_tile<3>(sums(3, 0), 64);
    }

    // Clears sums and finds the scales of up to `most` groups of rows; the number of groups.
    int64_t begin(int64_t from, int64_t last, int64_t most, int64_t panels) {
        const int64_t left = (last - from + kTileRows - 1) / kTileRows, groups = left < most ? left : most;
        for (int64_t g = 0; g < groups; ++g) scales_[g].start(w_, from + g * kTileRows, last, true);
        std::memset(work_.sums, 0, static_cast<size_t>(groups * panels * kTileBytes));
        return groups;
    }

    void end(int64_t from, int64_t last, int64_t groups, int64_t tokens, float* const* y) {
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t p = 0; p < x_.count; ++p) {
                const int64_t left = tokens - p * kPanel, some = left < kPanel ? left : kPanel;
                finish(w_, from + g * kTileRows, last, sums(g, p), some, false, y + p * kPanel);
            }
        }
    }

    void unit(int64_t from, int64_t last, int64_t group, int64_t c, Unit& to) {
        scales_[group].chunk(c, to);
        unpack_unit(w_, unpack_, from + group * kTileRows, last, c, to);
    }

    // The first rows have none before them that bring them: later chunks of sixteen, side by side.
    void fetch_along(int64_t row, int64_t last, int64_t c) const {
        for (int64_t r = row; r < row + kTileRows && r < last && c < chunks(w_); ++r) {
            const auto* at = reinterpret_cast<const char*>(w_.codes + r * w_.row_bytes + c * Unpack::kBytes);
            for (int64_t line = 0; line < Unpack::kBytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
        }
    }

    // The next rows are brought to L2 in the order of memory: sixteen rows side by side are in none.
    void fetch(int64_t row, int64_t last, int64_t i) const {
        constexpr int64_t kBytes = kTileRows * Unpack::kBytes;
        const int64_t size = (last - row) * w_.row_bytes;
        for (int64_t line = i * kBytes; line < (i + 1) * kBytes && line < size; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(w_.codes + row * w_.row_bytes + line), _MM_HINT_T1);
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

template <class Unpack, class Codes, Span kSpan>
void rows_of(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
             uint8_t* scratch) {
    if (x.tokens == 1) {
        OneToken<Codes, kSpan> one(w, reinterpret_cast<const float*>(x.packed),
                                   reinterpret_cast<float*>(scratch));
        return one.rows(first, last, y[0]);
    }
    const uint8_t* packed = x.packed;
    for (int64_t t = 0; t < x.tokens; t += kMostTokens) {
        const int64_t some = x.tokens - t < kMostTokens ? x.tokens - t : kMostTokens;
        Panels panels = Panels::of(some);
        panels.data = packed;
        packed += panels.bytes(chunks(w));
        const Tiles tiles(columns_of(kSpan), static_cast<int>(panels.width));
        Rows<Unpack, kSpan> rows(w, panels, Work(scratch));
        if (panels.count == 1) {
            rows.few(first, last, some, y + t);
        } else {
            rows.many(first, last, some, y + t);
        }
    }
}

template <class Unpack, class Codes>
void rows_by_span(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
                  uint8_t* scratch) {
    switch (span_of(w)) {
        case Span::all:
            return rows_of<Unpack, Codes, Span::all>(w, x, first, last, y, scratch);
        case Span::chunk:
            return rows_of<Unpack, Codes, Span::chunk>(w, x, first, last, y, scratch);
        case Span::c32:
            return rows_of<Unpack, Codes, Span::c32>(w, x, first, last, y, scratch);
        default:
            return rows_of<Unpack, Codes, Span::c16>(w, x, first, last, y, scratch);
    }
}

void rows(const Weight& w, const Prepared& x, int64_t first, int64_t last, float* const* y,
          uint8_t* scratch) {
    using namespace avx512_bf16;
    if (x.tokens == 0 || first == last) return;
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.rows(w, x, first, last, y, scratch);
    switch (w.element) {
        case Element::bf16:
            return rows_by_span<UnpackBf16, OneWords>(w, x, first, last, y, scratch);
        case Element::e4m3:
            return rows_by_span<UnpackE4m3<Order::natural>, OneBytes<E4m3Value>>(w, x, first, last, y,
                                                                                 scratch);
        case Element::int8:
            return rows_by_span<UnpackInt8<Order::natural>, OneBytes<Int8Value>>(w, x, first, last, y,
                                                                                 scratch);
        case Element::e2m3:
        case Element::e3m2:
            return rows_by_span<UnpackSixBits<Order::natural>, OneSixBits>(w, x, first, last, y, scratch);
        default:
            if (order_of(w) == Order::sixteens)
                return rows_of<TileNibbles<Order::sixteens>, OneNibbles, Span::c16>(w, x, first, last, y,
                                                                                    scratch);
            return rows_by_span<TileNibbles<Order::lanes>, OneNibbles>(w, x, first, last, y, scratch);
    }
}

int64_t scratch_bytes(const Weight& w, int64_t tokens) {
    if (span_of(w) == Span::other) return avx512_bf16::kKernels.scratch_bytes(w, tokens);
    const int64_t one = kTileRows * dealt_bytes(w, chunks(w)) / columns_of(span_of(w));
    const int64_t panels = ((tokens < kMostTokens ? tokens : kMostTokens) + kPanel - 1) / kPanel;
    return tokens == 1 ? one : Work::bytes(panels);
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
