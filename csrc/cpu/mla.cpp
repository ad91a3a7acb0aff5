// Softmax runs over blocks of kRanks that count ranks in a token's list, within segments that are joined in
// order: neither the batch nor the number of threads moves a block.
#include "mla.h"

#include <omp.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "row_blocks.h"
#include "workspace.h"

namespace hadron {
namespace {

constexpr int64_t kTokens = 64;    // that share an expansion of kv_b_proj
constexpr int64_t kSegment = 256;  // ranks that one thread takes at a time

enum Fault : int64_t { none = 0, outside_table = 1, outside_cache = 2 };

// Pointers to the rows of a token's list, of `bytes` each; the number of them.
int64_t find_rows(const LatentPages& cache, const Selection& chosen, int64_t bytes, int64_t token,
                  const uint8_t** rows, int64_t& fault) {
    const int64_t owner = chosen.owners[token];
    if (owner < 0 || owner >= chosen.requests) return fault = outside_table, 0;
    const int64_t *positions = chosen.positions + token * chosen.width,
                  *table = chosen.tables + owner * chosen.pages;
    int64_t count = 0;
    for (int64_t i = 0; i < chosen.width; ++i) {
        if (positions[i] < 0) continue;
        const int64_t page = positions[i] / cache.page_size;
        if (page >= chosen.pages) return fault = outside_table, 0;
        const int64_t block = table[page];
        if (block < 0 || block >= cache.blocks) return fault = outside_cache, 0;
        rows[count++] = cache.rows + (block * cache.page_size + positions[i] % cache.page_size) * bytes;
    }
    return count;
}

void refuse(const std::vector<int64_t>& faults, const LatentPages& cache, const Selection& chosen,
            int64_t first) {
    for (size_t t = 0; t < faults.size(); ++t) {
        if (faults[t] == outside_table) {
            const int64_t* at = chosen.positions + (first + static_cast<int64_t>(t)) * chosen.width;
            const int64_t most = chosen.width ? *std::max_element(at, at + chosen.width) : 0;
            throw std::out_of_range("position " + std::to_string(most) + " lies outside a table of " +
                                    std::to_string(chosen.pages) + " pages");
        }
        if (faults[t] == outside_cache) {
            throw std::out_of_range("a selected position lies in a block outside 0 .. " +
                                    std::to_string(cache.blocks - 1));
        }
    }
}

// Buffers of the calling thread, shared with its team for the length of a call.
struct Buffers {
    Workspace latents, partial, scratch, prepared;
};
Buffers& buffers() {
    thread_local Buffers of_thread;
    return of_thread;
}

int team(int threads, int64_t work) {
    return static_cast<int>(std::clamp<int64_t>(work, 1, std::max(1, threads)));
}

// A row of results as k.rows addresses it: results of rows first .. lie at `base`.
float* from_row(float* base, int64_t first) {
    return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(base) - static_cast<uintptr_t>(first) * 4);
}

// One step of up to kTokens tokens.
class Step {
  public:
    Step(const Kernels& k, const Weight& kv_b, const MlaSizes& n, const LatentPages& cache,
         const Selection& chosen, const uint8_t* query, Plain type, int64_t first, int64_t tokens,
         uint8_t* out, int threads)
        : k_(k),
          ops_(lane_ops(k)),
          w_(kv_b),
          n_(n),
          cache_(cache),
          format_(k, cache.type, n.rank, n.rope),
          query_(query),
          type_(type),
          first_(first),
          tokens_(tokens),
          out_(out),
          threads_(threads),
          groups_((n.heads + kGroup - 1) / kGroup),
          counts_(static_cast<size_t>(tokens)) {
        find(chosen);
        latents_ = buffers().latents.floats(tokens * n.heads * n.width());
    }

    void run() {
        absorb();
        int64_t tasks = 0;
        const bool split = tokens_ * groups_ < 2 * threads_;
        for (int64_t t = 0; t < tokens_; ++t) tasks += groups_ * (split ? segments(t) : 1);
        split&& tasks > tokens_* groups_ ? attend_by_segments() : attend();
        expand();
    }

  private:
    int64_t segments(int64_t t) const {
        return std::max<int64_t>(1, (counts_[static_cast<size_t>(t)] + kSegment - 1) / kSegment);
    }
    const uint8_t* const* rows(int64_t t) const { return rows_.data() + t * stride_; }
    float* latent(int64_t t, int64_t head) const { return latents_ + (t * n_.heads + head) * n_.width(); }
    int64_t heads_of(int64_t group) const { return std::min(kGroup, n_.heads - group * kGroup); }
    int64_t head_rows() const { return n_.nope + n_.v; }
    const uint8_t* query(int64_t t, int64_t head) const {
        return query_ + ((first_ + t) * n_.heads + head) * (n_.nope + n_.rope) * plain_bytes(type_);
    }

    void find(const Selection& chosen) {
        stride_ = chosen.width;
        rows_.resize(static_cast<size_t>(tokens_ * stride_));
        std::vector<int64_t> faults(static_cast<size_t>(tokens_), none);
#pragma omp parallel for schedule(static) num_threads(team(threads_, tokens_))
        for (int64_t t = 0; t < tokens_; ++t) {
            const auto i = static_cast<size_t>(t);
            counts_[i] =
                find_rows(cache_, chosen, format_.bytes(), first_ + t, rows_.data() + t * stride_, faults[i]);
        }
        refuse(faults, cache_, chosen, first_);
    }

    // Queries over latents, the rotary part behind.
    void absorb() {
        const int64_t widened = aligned(tokens_ * n_.nope * 4),
                      bytes = widened + aligned(ops_.absorb_bytes(w_, tokens_));
        const int workers = team(threads_, n_.heads);
        uint8_t* scratch = buffers().scratch.bytes(bytes * workers);
#pragma omp parallel num_threads(workers)
        {
            uint8_t* mine = scratch + omp_get_thread_num() * bytes;
            auto* wide = reinterpret_cast<float*>(mine);
            std::vector<const float*> q(static_cast<size_t>(tokens_));
            std::vector<float*> to(static_cast<size_t>(tokens_));
#pragma omp for schedule(dynamic)
            for (int64_t h = 0; h < n_.heads; ++h) {
                for (int64_t t = 0; t < tokens_; ++t) {
                    const auto i = static_cast<size_t>(t);
                    ops_.widen(query(t, h), type_, n_.nope, wide + t * n_.nope);
                    q[i] = wide + t * n_.nope, to[i] = latent(t, h);
                    ops_.widen(query(t, h) + n_.nope * plain_bytes(type_), type_, n_.rope, to[i] + n_.rank);
                }
                ops_.absorb(w_, h * head_rows(), n_.nope, q.data(), tokens_, to.data(), mine + widened);
            }
        }
    }

    // Ranks of one segment from nothing.
    void attend_segment(RowBlocks& blocks, int64_t t, int64_t segment, Mixed& to) const {
        const int64_t from = segment * kSegment,
                      end = std::min(from + kSegment, counts_[static_cast<size_t>(t)]);
        to.clear(n_.rank);
        blocks.run(rows(t) + from, rows(t) + from, std::max<int64_t>(0, end - from), nullptr, to);
    }

    void finish(Mixed& mixed, int64_t t, int64_t group) const {
        float* out[kGroup];
        for (int64_t i = 0; i < heads_of(group); ++i) out[i] = latent(t, group * kGroup + i);
        ops_.finish(mixed.mixed, mixed.sums, heads_of(group), n_.rank, out);
    }

    int64_t blocks_bytes() const {
        return RowBlocks::bytes(ops_, format_.type(), n_.width(), n_.rank, format_.fp8());
    }
    RowBlocks blocks(uint8_t* scratch) const {
        return {
            ops_, format_.type(), n_.width(), n_.rank, n_.scale, scratch, format_.fp8() ? &format_ : nullptr};
    }

    void attend() {
        const int64_t tasks = tokens_ * groups_, state = Mixed::bytes(n_.rank),
                      bytes = blocks_bytes() + 2 * state;
        const int workers = team(threads_, tasks);
        uint8_t* scratch = buffers().scratch.bytes(bytes * workers);
#pragma omp parallel num_threads(workers)
        {
            uint8_t* mine = scratch + omp_get_thread_num() * bytes;
            Mixed all(mine, n_.rank), more(mine + state, n_.rank);
            RowBlocks of_mine = blocks(mine + 2 * state);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; ++task) {
                const int64_t t = task / groups_, group = task % groups_;
                of_mine.queries(latent(t, group * kGroup), n_.width(), heads_of(group));
                attend_segment(of_mine, t, 0, all);
                for (int64_t s = 1; s < segments(t); ++s) {
                    attend_segment(of_mine, t, s, more);
                    ops_.join(n_.rank, all.mixed, all.maxima, all.sums, more.mixed, more.maxima, more.sums);
                }
                finish(all, t, group);
            }
        }
    }

    // Few tokens on many threads: segments apart, joined afterwards in the same order.
    void attend_by_segments() {
        struct Task {
            int64_t token, group, segment;
        };
        std::vector<Task> tasks;
        std::vector<size_t> first_of;
        for (int64_t t = 0; t < tokens_; ++t) {
            for (int64_t g = 0; g < groups_; ++g) {
                first_of.push_back(tasks.size());
                for (int64_t s = 0; s < segments(t); ++s) tasks.push_back({t, g, s});
            }
        }
        const int64_t state = Mixed::bytes(n_.rank), bytes = blocks_bytes();
        const int workers = team(threads_, static_cast<int64_t>(tasks.size()));
        uint8_t* scratch = buffers().scratch.bytes(bytes * workers);
        uint8_t* partial = buffers().partial.bytes(state * static_cast<int64_t>(tasks.size()));
        const auto mixed = [&](size_t task) {
            return Mixed(partial + static_cast<int64_t>(task) * state, n_.rank);
        };
#pragma omp parallel num_threads(workers)
        {
            RowBlocks of_mine = blocks(scratch + omp_get_thread_num() * bytes);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < tasks.size(); ++i) {
                const Task& task = tasks[i];
                of_mine.queries(latent(task.token, task.group * kGroup), n_.width(), heads_of(task.group));
                Mixed to = mixed(i);
                attend_segment(of_mine, task.token, task.segment, to);
            }
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < first_of.size(); ++i) {
                const Task& task = tasks[first_of[i]];
                Mixed all = mixed(first_of[i]);
                for (int64_t s = 1; s < segments(task.token); ++s) {
                    const Mixed more = mixed(first_of[i] + static_cast<size_t>(s));
                    ops_.join(n_.rank, all.mixed, all.maxima, all.sums, more.mixed, more.maxima, more.sums);
                }
                finish(all, task.token, task.group);
            }
        }
    }

    void expand() {
        const int64_t stride = aligned(k_.prepared_bytes(w_)), results = aligned(tokens_ * n_.v * 4),
                      packed_bytes = k_.bytes_packed(w_, tokens_),
                      bytes =
                          stride * tokens_ + results + packed_bytes + aligned(k_.scratch_bytes(w_, tokens_));
        const int workers = team(threads_, n_.heads);
        uint8_t* scratch = buffers().scratch.bytes(bytes * workers);
#pragma omp parallel num_threads(workers)
        {
            uint8_t* mine = scratch + omp_get_thread_num() * bytes;
            auto* y = reinterpret_cast<float*>(mine + stride * tokens_);
            std::vector<const uint8_t*> x(static_cast<size_t>(tokens_));
            std::vector<float*> to(static_cast<size_t>(tokens_));
#pragma omp for schedule(dynamic)
            for (int64_t h = 0; h < n_.heads; ++h) {
                const int64_t first = h * head_rows() + n_.nope;
                for (int64_t t = 0; t < tokens_; ++t) {
                    const auto i = static_cast<size_t>(t);
                    k_.prepare(w_, latent(t, h), mine + t * stride);
                    x[i] = mine + t * stride, to[i] = from_row(y + t * n_.v, first);
                }
                uint8_t* packed = packed_bytes != 0 ? mine + stride * tokens_ + results : nullptr;
                if (packed != nullptr) k_.pack(w_, x.data(), tokens_, 0, 1, packed);
                k_.rows(w_, {x.data(), packed, tokens_}, first, first + n_.v, to.data(),
                        mine + stride * tokens_ + results + packed_bytes);
                for (int64_t t = 0; t < tokens_; ++t) {
                    uint8_t* place = out_ + ((first_ + t) * n_.heads + h) * n_.v * plain_bytes(type_);
                    ops_.narrow(y + t * n_.v, type_, n_.v, place);
                }
            }
        }
    }

    const Kernels& k_;
    const LaneOps& ops_;
    const Weight& w_;
    const MlaSizes& n_;
    const LatentPages& cache_;
    const CachedRows format_;
    const uint8_t* query_;
    const Plain type_;
    const int64_t first_, tokens_;
    uint8_t* const out_;
    const int threads_;
    const int64_t groups_;
    int64_t stride_ = 0;
    std::vector<int64_t> counts_;
    std::vector<const uint8_t*> rows_;
    float* latents_ = nullptr;  // [tokens][heads][width]: queries over latents, then mixes of latents
};

}  // namespace

void sparse_attend(const Kernels& k, const Weight& kv_b, const MlaSizes& n, const LatentPages& cache,
                   const Selection& chosen, const uint8_t* query, Plain type, int64_t tokens, uint8_t* out,
                   int threads) {
    for (int64_t first = 0; first < tokens; first += kTokens) {
        Step(k, kv_b, n, cache, chosen, query, type, first, std::min(kTokens, tokens - first), out, threads)
            .run();
    }
}

}  // namespace hadron
