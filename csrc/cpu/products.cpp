// Rows are shared out over OpenMP threads in fixed blocks; who computes a row never changes its bits.
//
// The experts of a step are one pool of work: blocks of rows of every chosen expert, taken in turn, so that
// eight experts of one token occupy all threads as well as one expert of five hundred does.
#include "products.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>

#include "workspace.h"

namespace hadron {
namespace {

constexpr int64_t kBlock = 16;       // rows of the smallest share: the tile of the widest level
constexpr int64_t kLeastPiece = 64;  // rows of one piece of expert work, at least and at most: what comes
constexpr int64_t kMostPiece = 256;  // after the first rows is fetched ahead
constexpr int64_t kPieces = 8;       // that a thread takes, where there are rows enough

int64_t aligned(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

// One workspace a thread and purpose, kept for the life of the thread.
Workspace& scratch() {
    thread_local Workspace workspace;
    return workspace;
}

// Buffers of the calling thread, shared with its team for the length of a call.
struct Buffers {
    Workspace prepared, packed, gated, hidden, results;
    std::vector<const uint8_t*> rows;
    std::vector<float*> out;
};
Buffers& buffers() {
    thread_local Buffers of_thread;
    return of_thread;
}

// Carries an exception out of a parallel region.
class Caught {
  public:
    template <class Work>
    void run(Work&& work) {
        try {
            work();
        } catch (...) {
            if (!taken_.test_and_set()) error_ = std::current_exception();
        }
    }
    void rethrow() {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
    std::exception_ptr error_;
};

// Rows of prepared activations for weights of one order, with pointers to each.
void point(uint8_t* base, int64_t stride, int64_t count, std::vector<const uint8_t*>& rows) {
    rows.resize(static_cast<size_t>(count));
    for (int64_t t = 0; t < count; ++t) rows[static_cast<size_t>(t)] = base + t * stride;
}

void point(float* base, int64_t stride, int64_t count, std::vector<float*>& rows) {
    rows.resize(static_cast<size_t>(count));
    for (int64_t t = 0; t < count; ++t) rows[static_cast<size_t>(t)] = base + t * stride;
}

int team(int threads, int64_t work) {
    return static_cast<int>(std::clamp<int64_t>(work, 1, std::max(1, threads)));
}

}  // namespace

namespace {

// Activations that products share, prepared for the order of a weight.
struct Input {
    const Weight* weight;
    const float* x;
    int order;
    int64_t first;  // of its rows
    uint8_t* packed;
    int64_t stride(const Kernels& k) const { return aligned(k.prepared_bytes(*weight)); }
};

// Calls work(product, first row, last row) for this thread's share of all bytes, in blocks of rows.
template <class Work>
void share_out(const std::vector<Product>& products, Work&& work) {
    const auto blocks = [](const Weight& w) { return (w.rows + kBlock - 1) / kBlock; };
    int64_t total = 0, before = 0;
    for (const Product& product : products) total += blocks(*product.weight) * product.weight->row_bytes;
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t from = total * me / team, to = total * (me + 1) / team;
    for (size_t i = 0; i < products.size(); ++i) {
        const Weight& w = *products[i].weight;
        const auto block = [&](int64_t at) {
            return std::min(w.rows, std::clamp<int64_t>((at - before) / w.row_bytes, 0, blocks(w)) * kBlock);
        };
        if (block(from) < block(to)) work(i, block(from), block(to));
        before += blocks(w) * w.row_bytes;
    }
}

}  // namespace

void linears(const Kernels& k, const std::vector<Product>& products, int64_t tokens, int threads) {
    if (tokens == 0) return;
    Buffers& b = buffers();
    std::vector<Input> inputs;
    std::vector<size_t> input_of;
    int64_t prepared_bytes = 0, packed_bytes = 0, scratch_bytes = 0, blocks = 0;
    for (const Product& product : products) {
        const Weight& w = *product.weight;
        const int order = k.order(w);
        const auto same = [&](const Input& in) { return in.x == product.x && in.order == order; };
        const auto found = std::find_if(inputs.begin(), inputs.end(), same);
        input_of.push_back(static_cast<size_t>(found - inputs.begin()));
        if (found == inputs.end()) {
            inputs.push_back({&w, product.x, order, static_cast<int64_t>(inputs.size()) * tokens, nullptr});
            prepared_bytes += inputs.back().stride(k) * tokens;
            packed_bytes += k.bytes_packed(w, tokens);
        }
        scratch_bytes = std::max(scratch_bytes, k.scratch_bytes(w, tokens));
        blocks += (w.rows + kBlock - 1) / kBlock;
    }
    uint8_t* prepared = b.prepared.bytes(prepared_bytes);
    uint8_t* packed = packed_bytes != 0 ? b.packed.bytes(packed_bytes) : nullptr;
    b.rows.clear(), b.out.clear();
    for (Input& in : inputs) {
        for (int64_t t = 0; t < tokens; ++t, prepared += in.stride(k)) b.rows.push_back(prepared);
        const int64_t size = k.bytes_packed(*in.weight, tokens);
        if (size != 0) in.packed = packed, packed += size;
    }
    for (const Product& product : products) {
        for (int64_t t = 0; t < tokens; ++t) b.out.push_back(product.y + t * product.weight->rows);
    }
    Caught caught;
#pragma omp parallel num_threads(team(threads, blocks))
    {
        for (const Input& in : inputs) {
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tokens; ++t) {
                k.prepare(*in.weight, in.x + t * in.weight->columns,
                          const_cast<uint8_t*>(b.rows[static_cast<size_t>(in.first + t)]));
            }
        }
#pragma omp barrier
        if (packed != nullptr) {
            for (const Input& in : inputs) {
                if (in.packed != nullptr)
                    k.pack(*in.weight, b.rows.data() + in.first, tokens, omp_get_thread_num(),
                           omp_get_num_threads(), in.packed);
            }
#pragma omp barrier
        }
        caught.run([&] {
            uint8_t* mine = scratch().bytes(scratch_bytes);
            share_out(products, [&](size_t i, int64_t first, int64_t last) {
                const Input& in = inputs[input_of[i]];
                k.rows(*products[i].weight, {b.rows.data() + in.first, in.packed, tokens}, first, last,
                       b.out.data() + static_cast<int64_t>(i) * tokens, mine);
            });
        });
    }
    caught.rethrow();
}

void mlp(const Kernels& k, const GatedMlp& block, const float* x, int64_t tokens, float* y, int threads) {
    const std::vector<GatedMlp> one = {block};
    moe(k, one, &block, x, nullptr, nullptr, tokens, 0, block.down->rows, y, threads);
}

namespace {

// The tokens of one expert (or of the shared one) in a step.
struct Job {
    const GatedMlp* block;
    int64_t first;                // its first row in the buffers of all jobs
    std::vector<int64_t> tokens;  // rows of x
    std::vector<const uint8_t*> gate_x, up_x, hidden_x;
    uint8_t *gate_packed, *up_packed, *hidden_packed;  // null: not packed; up_packed may be gate_packed
    std::vector<float*> gated, upped, out;

    int64_t count() const { return static_cast<int64_t>(tokens.size()); }
    void pack_inputs(const Kernels& k) const {
        if (gate_packed != nullptr) k.pack(*block->gate, gate_x.data(), count(), 0, 1, gate_packed);
        if (up_packed != nullptr && up_packed != gate_packed)
            k.pack(*block->up, up_x.data(), count(), 0, 1, up_packed);
    }
    void pack_hidden(const Kernels& k) const {
        if (hidden_packed != nullptr) k.pack(*block->down, hidden_x.data(), count(), 0, 1, hidden_packed);
    }
};

// A block of rows of one weight of one job.
struct Piece {
    int job;
    int part;  // 0: gate, 1: up
    int64_t first, last;
};

void cut(int job, int part, int64_t rows, int64_t size, std::vector<Piece>& pieces) {
    for (int64_t from = 0; from < rows; from += size) {
        pieces.push_back({job, part, from, std::min(rows, from + size)});
    }
}

// Rows of a piece, for all rows of a phase and this many threads.
int64_t piece_rows(int64_t rows, int threads) {
    const int64_t even = rows / (kPieces * std::max(1, threads)) / kLeastPiece * kLeastPiece;
    return std::clamp(even, kLeastPiece, kMostPiece);
}

// Places for packed activations, handed out before their memory is there.
class Places {
  public:
    explicit Places(const Kernels& k) : k_(k) {}
    // Where those of `tokens` tokens for a weight begin, or -1.
    int64_t take(const Weight& w, int64_t tokens) {
        const int64_t size = k_.bytes_packed(w, tokens), at = bytes_;
        bytes_ += size;
        return size != 0 ? at : -1;
    }
    int64_t bytes() const { return bytes_; }

  private:
    const Kernels& k_;
    int64_t bytes_ = 0;
};

}  // namespace

void moe(const Kernels& k, const std::vector<GatedMlp>& experts, const GatedMlp* shared, const float* x,
         const int64_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t hidden, float* y,
         int threads) {
    if (tokens == 0) return;
    std::map<int64_t, std::vector<int64_t>> chosen;  // expert -> places in ids, ascending
    for (int64_t i = 0; i < tokens * top_k; ++i) chosen[ids[i]].push_back(i);
    std::vector<Job> jobs;
    std::vector<int64_t> row_of(static_cast<size_t>(tokens * top_k));  // place in ids -> row of the results
    int64_t rows = 0, wide = 0;
    const auto add = [&](const GatedMlp& block, int64_t count) -> Job& {
        jobs.push_back(Job{&block, rows, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}});
        rows += count;
        wide = std::max(wide, block.gate->rows);
        return jobs.back();
    };
    for (const auto& [expert, places] : chosen) {
        Job& job = add(experts[static_cast<size_t>(expert)], static_cast<int64_t>(places.size()));
        for (const int64_t place : places) {
            row_of[static_cast<size_t>(place)] = job.first + static_cast<int64_t>(job.tokens.size());
            job.tokens.push_back(place / top_k);
        }
    }
    if (shared != nullptr) {
        Job& job = add(*shared, tokens);
        for (int64_t t = 0; t < tokens; ++t) job.tokens.push_back(t);
    }

    // Activations are prepared once for every order that occurs among gate and up.
    std::map<int, std::pair<const Weight*, int64_t>> orders;  // order -> a weight of it, offset
    int64_t prepared_bytes = 0;
    for (const Job& job : jobs) {
        for (const Weight* w : {job.block->gate, job.block->up}) {
            if (orders.try_emplace(k.order(*w), w, prepared_bytes).second) {
                prepared_bytes += aligned(k.prepared_bytes(*w)) * tokens;
            }
        }
    }
    Buffers& b = buffers();
    uint8_t* prepared = b.prepared.bytes(prepared_bytes);
    float* gated = b.gated.floats(2 * rows * wide);
    float* results = b.results.floats(rows * hidden);
    int64_t hidden_bytes = 0, scratch_bytes = 0;
    std::vector<int64_t> hidden_at;
    std::vector<std::array<int64_t, 3>> packed_at;  // of a job: for gate, up and down
    Places places(k);
    std::vector<Piece> up_pieces, down_pieces;
    int64_t up_rows = 0, down_rows = 0;
    for (size_t j = 0; j < jobs.size(); ++j) {
        Job& job = jobs[j];
        const auto count = static_cast<int64_t>(job.tokens.size());
        const auto gather = [&](const Weight& w, std::vector<const uint8_t*>& to) {
            const int64_t stride = aligned(k.prepared_bytes(w)), at = orders.at(k.order(w)).second;
            for (const int64_t t : job.tokens) to.push_back(prepared + at + t * stride);
        };
        gather(*job.block->gate, job.gate_x);
        gather(*job.block->up, job.up_x);
        point(gated + job.first * wide, wide, count, job.gated);
        point(gated + (rows + job.first) * wide, wide, count, job.upped);
        point(results + job.first * hidden, hidden, count, job.out);
        hidden_at.push_back(hidden_bytes);
        hidden_bytes += aligned(k.prepared_bytes(*job.block->down)) * count;
        const auto& [gate, up, down, limit] = *job.block;
        for (const Weight* w : {gate, up, down}) {
            scratch_bytes = std::max(scratch_bytes, k.scratch_bytes(*w, count));
        }
        const int64_t of_gate = places.take(*gate, count);
        const int64_t of_up = k.order(*gate) == k.order(*up) ? of_gate : places.take(*up, count);
        packed_at.push_back({of_gate, of_up, places.take(*down, count)});
        up_rows += gate->rows + up->rows, down_rows += down->rows;
    }
    for (size_t j = 0; j < jobs.size(); ++j) {
        const GatedMlp& block = *jobs[j].block;
        const auto job = static_cast<int>(j);
        cut(job, 0, block.gate->rows, piece_rows(up_rows, threads), up_pieces);
        cut(job, 1, block.up->rows, piece_rows(up_rows, threads), up_pieces);
        cut(job, 0, block.down->rows, piece_rows(down_rows, threads), down_pieces);
    }
    uint8_t* packed = b.packed.bytes(places.bytes());
    uint8_t* hidden_x = b.hidden.bytes(hidden_bytes);
    std::vector<std::pair<size_t, int64_t>> hidden_rows;  // (job, row of it)
    for (size_t j = 0; j < jobs.size(); ++j) {
        const int64_t stride = aligned(k.prepared_bytes(*jobs[j].block->down));
        point(hidden_x + hidden_at[j], stride, static_cast<int64_t>(jobs[j].tokens.size()), jobs[j].hidden_x);
        const auto at = [&](int part) {
            return packed_at[j][part] < 0 ? nullptr : packed + packed_at[j][part];
        };
        jobs[j].gate_packed = at(0), jobs[j].up_packed = at(1), jobs[j].hidden_packed = at(2);
        for (size_t i = 0; i < jobs[j].tokens.size(); ++i)
            hidden_rows.emplace_back(j, static_cast<int64_t>(i));
    }

    std::atomic<size_t> next_up{0}, next_down{0};
    Caught caught;
#pragma omp parallel num_threads(team(threads, static_cast<int64_t>(up_pieces.size())))
    {
        uint8_t* mine = nullptr;
        caught.run([&] { mine = scratch().bytes(scratch_bytes); });
        for (const auto& [order, of_order] : orders) {
            const Weight& w = *of_order.first;
            const int64_t stride = aligned(k.prepared_bytes(w));
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tokens; ++t)
                k.prepare(w, x + t * w.columns, prepared + of_order.second + t * stride);
        }
#pragma omp barrier
        if (places.bytes() != 0) {
#pragma omp for schedule(dynamic)
            for (size_t j = 0; j < jobs.size(); ++j) jobs[j].pack_inputs(k);
        }
        for (size_t i; mine != nullptr && (i = next_up.fetch_add(1)) < up_pieces.size();) {
            const Piece& piece = up_pieces[i];
            Job& job = jobs[static_cast<size_t>(piece.job)];
            const bool is_gate = piece.part == 0;
            const Prepared input = is_gate ? Prepared{job.gate_x.data(), job.gate_packed, job.count()}
                                           : Prepared{job.up_x.data(), job.up_packed, job.count()};
            k.rows(is_gate ? *job.block->gate : *job.block->up, input, piece.first, piece.last,
                   is_gate ? job.gated.data() : job.upped.data(), mine);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (size_t i = 0; i < hidden_rows.size(); ++i) {
            Job& job = jobs[hidden_rows[i].first];
            const auto r = static_cast<size_t>(hidden_rows[i].second);
            const GatedMlp& block = *job.block;
            k.gate(job.gated[r], job.upped[r], block.limit, block.gate->rows, job.gated[r]);
            k.prepare(*block.down, job.gated[r], const_cast<uint8_t*>(job.hidden_x[r]));
        }
        if (places.bytes() != 0) {
#pragma omp for schedule(dynamic)
            for (size_t j = 0; j < jobs.size(); ++j) jobs[j].pack_hidden(k);
        }
        for (size_t i; mine != nullptr && (i = next_down.fetch_add(1)) < down_pieces.size();) {
            const Piece& piece = down_pieces[i];
            Job& job = jobs[static_cast<size_t>(piece.job)];
            k.rows(*job.block->down, {job.hidden_x.data(), job.hidden_packed, job.count()}, piece.first,
                   piece.last, job.out.data(), mine);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            float* out = y + t * hidden;
            std::fill(out, out + hidden, 0.0f);
            // Places of a token ascend by expert: the router gives them so.
            for (int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
                const float weight = weights[i];
                const float* part = results + row_of[static_cast<size_t>(i)] * hidden;
                for (int64_t h = 0; h < hidden; ++h) out[h] += part[h] * weight;
            }
            if (shared != nullptr) {
                const float* part = jobs.back().out[static_cast<size_t>(t)];
                for (int64_t h = 0; h < hidden; ++h) out[h] += part[h];
            }
        }
    }
    caught.rethrow();
}

}  // namespace hadron
