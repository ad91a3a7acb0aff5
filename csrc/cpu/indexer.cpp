// Scores never exceed a block: what a block holds above the worst of the best so far joins a list of
// candidates, and a list that is full is cut to the best. Which part of the keys a thread takes changes
// nothing, for the best of all are among the best of the parts.
#include "indexer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "row_blocks.h"
#include "workspace.h"

namespace hadron {
namespace {

constexpr int64_t kLeastPart = 4096;  // keys that are worth a thread

struct Candidate {
    float score;
    int64_t index;
};

// Larger scores first, ties to the lowest index.
bool better(const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.index < b.index;
}

// The best `count` of what is offered in ascending order of its index.
class Best {
  public:
    void start(int64_t count) {
        count_ = static_cast<size_t>(count);
        least_ = -std::numeric_limits<float>::infinity();
        list_.clear();
        list_.reserve(2 * count_ + kRanks);
    }

    void offer(const float* scores, int64_t n, int64_t first) {
        for (int64_t i = 0; i < n; ++i) {
            if (scores[i] > least_) list_.push_back({scores[i], first + i});
        }
        if (list_.size() >= 2 * count_) cut();
    }

    void cut() {
        if (list_.size() <= count_) return;
        const auto end = list_.begin() + static_cast<std::ptrdiff_t>(count_);
        std::nth_element(list_.begin(), end - 1, list_.end(), better);
        list_.resize(count_);
        least_ = list_.back().score;
    }

    void join(const Best& other) { list_.insert(list_.end(), other.list_.begin(), other.list_.end()); }

    std::vector<Candidate>& sorted() {
        cut();
        std::sort(list_.begin(), list_.end(),
                  [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
        return list_;
    }

  private:
    size_t count_ = 0;
    float least_ = 0.0f;
    std::vector<Candidate> list_;
};

Workspace& scratch_of_calls() {
    thread_local Workspace of_thread;
    return of_thread;
}

bool finite(const float* scores, int64_t n) {
    float worst = 0.0f;
    for (int64_t i = 0; i < n; ++i) worst += scores[i] - scores[i];  // 0, or NaN for good
    return worst == 0.0f;
}

struct Part {
    int64_t token, from, end;
};

// Scores of one token with keys, block by block.
class Scorer {
  public:
    static int64_t bytes(const LaneOps& ops, const IndexPages& cache, int64_t heads) {
        const RowOps& row = RowBlocks::rows_of(ops, cache.type);
        const int64_t groups = (heads + kGroup - 1) / kGroup;
        return aligned(heads * cache.size * 4) +
               groups * (aligned(row.query_bytes(cache.size)) + kGroup * 4) + kRanks * (kGroup + 1) * 4 +
               (RowBlocks::widens(ops, cache.type) ? kRanks * cache.size * 4 : 0);
    }

    Scorer(const LaneOps& ops, const IndexPages& cache, int64_t heads, uint8_t* scratch)
        : ops_(ops),
          row_(RowBlocks::rows_of(ops, cache.type)),
          cache_(cache),
          heads_(heads),
          groups_((heads + kGroup - 1) / kGroup),
          stride_(aligned(row_.query_bytes(cache.size))) {
        queries_ = scratch;
        weights_ = reinterpret_cast<float*>(queries_ + groups_ * stride_);
        dots_ = weights_ + groups_ * kGroup;
        scores_ = dots_ + kRanks * kGroup;
        query_ = scores_ + kRanks;
        wide_ = query_ + aligned(heads * cache.size * 4) / 4;
    }

    void query(const uint8_t* q, Plain type, const float* weights) {
        ops_.widen(q, type, heads_ * cache_.size, query_);
        // 1/sqrt(size) and 1/sqrt(heads) are left out: they order nothing, and would round ties apart.
        for (int64_t g = 0; g < groups_; ++g) {
            const int64_t first = g * kGroup, some = std::min(kGroup, heads_ - first);
            row_.pack_queries(query_ + first * cache_.size, cache_.size, some, cache_.size,
                              queries_ + g * stride_);
            for (int64_t i = 0; i < kGroup; ++i) weights_[first + i] = i < some ? weights[first + i] : 0.0f;
        }
    }

    // Of `count` keys from `first` on, kRanks at most.
    const float* scores(const int64_t* table, int64_t first, int64_t count) {
        const int64_t bytes = cache_.size * plain_bytes(cache_.type),
                      whole = (count + kRows - 1) / kRows * kRows;
        const uint8_t* keys[kRanks];
        for (int64_t i = 0, page = first / cache_.rows_per_page, at = first % cache_.rows_per_page; i < count;
             ++i) {
            keys[i] = cache_.rows + (table[page] * cache_.rows_per_page + at) * bytes;
            if (++at == cache_.rows_per_page) at = 0, ++page;
        }
        if (RowBlocks::widens(ops_, cache_.type)) {
            for (int64_t i = 0; i < count; ++i) {
                ops_.widen(keys[i], cache_.type, cache_.size, wide_ + i * cache_.size);
                keys[i] = reinterpret_cast<const uint8_t*>(wide_ + i * cache_.size);
            }
        }
        std::fill(keys + count, keys + whole, keys[count - 1]);
        for (int64_t g = 0; g < groups_; ++g) {
            row_.dots(queries_ + g * stride_, keys, whole, cache_.size, dots_);
            ops_.score(dots_, whole, weights_ + g * kGroup, g > 0, scores_);
        }
        return scores_;
    }

  private:
    const LaneOps& ops_;
    const RowOps& row_;
    const IndexPages& cache_;
    int64_t heads_, groups_, stride_;
    uint8_t* queries_;
    float *weights_, *dots_, *scores_, *query_, *wide_;
};

void check_tables(const IndexPages& cache, const IndexStep& step) {
    for (int64_t r = 0; r < step.requests; ++r) {
        const int64_t rows = step.lengths[r] / cache.pool,
                      pages = (rows + cache.rows_per_page - 1) / cache.rows_per_page;
        if (pages > step.pages)
            throw std::out_of_range("key " + std::to_string(rows - 1) + " lies outside a table of " +
                                    std::to_string(step.pages) + " pages");
        for (int64_t p = 0; p < pages; ++p) {
            const int64_t block = step.tables[r * step.pages + p];
            if (block < 0 || block >= cache.blocks)
                throw std::out_of_range("block " + std::to_string(block) +
                                        " of a request lies outside 0 .. " +
                                        std::to_string(cache.blocks - 1));
        }
    }
}

}  // namespace

void store_keys(const Kernels& k, const IndexPages& cache, const IndexStep& step, const int64_t* slots,
                const float* keys, const float* gates, const float* table, float* tails,
                const int64_t* state_slots) {
    const LaneOps& ops = lane_ops(k);
    const int64_t size = cache.size, pool = cache.pool, rows = cache.blocks * cache.rows_per_page;
    for (int64_t t = 0; t < step.tokens; ++t) {
        if (slots[t] < 0 || slots[t] / pool >= rows)
            throw std::out_of_range("slot " + std::to_string(slots[t]) + ": the cache has 0 to " +
                                    std::to_string(rows * pool - 1));
    }
    const auto write = [&](int64_t t, const float* key) {
        ops.narrow(key, cache.type, size, cache.rows + slots[t] / pool * size * plain_bytes(cache.type));
    };
    if (gates == nullptr) {
        for (int64_t t = 0; t < step.tokens; ++t) write(t, keys + t * size);
        return;
    }
    std::vector<const float*> pool_keys(static_cast<size_t>(pool)), pool_gates(static_cast<size_t>(pool));
    std::vector<float> pooled(static_cast<size_t>(size));
    for (int64_t r = 0, first = 0; r < step.requests; first += step.query_lens[r], ++r) {
        const int64_t start = step.lengths[r] - step.query_lens[r];
        float* tail = tails == nullptr ? nullptr : tails + state_slots[r] * 2 * (pool - 1) * size;
        const auto row = [&](int64_t position, bool gate) -> const float* {
            if (position < start) return tail + ((gate ? pool - 1 : 0) + position % pool) * size;
            return (gate ? gates : keys) + (first + position - start) * size;
        };
        for (int64_t end = (start / pool + 1) * pool; end <= step.lengths[r]; end += pool) {
            for (int64_t i = 0; i < pool; ++i) {
                pool_keys[static_cast<size_t>(i)] = row(end - pool + i, false);
                pool_gates[static_cast<size_t>(i)] = row(end - pool + i, true);
            }
            ops.pool(pool_keys.data(), pool_gates.data(), table, pool, size, pooled.data());
            write(first + end - 1 - start, pooled.data());
        }
        for (int64_t p = std::max(start, step.lengths[r] / pool * pool); p < step.lengths[r]; ++p) {
            std::copy_n(row(p, false), size, tail + p % pool * size);
            std::copy_n(row(p, true), size, tail + (pool - 1 + p % pool) * size);
        }
    }
}

std::optional<NotFinite> select_keys(const Kernels& k, const IndexPages& cache, const IndexStep& step,
                                     const uint8_t* query, Plain type, const float* weights,
                                     const int64_t* positions, int64_t heads, int64_t count, bool tail,
                                     int64_t* out, int64_t width, int threads) {
    const LaneOps& ops = lane_ops(k);
    check_tables(cache, step);
    std::vector<const int64_t*> tables;
    std::vector<Part> parts;
    std::vector<size_t> first_of;
    for (int64_t r = 0, t = 0; r < step.requests; ++r) {
        for (int64_t i = 0; i < step.query_lens[r]; ++i, ++t) {
            const int64_t seen = (positions[t] + 1) / cache.pool;
            if (positions[t] < 0 || positions[t] >= step.lengths[r])
                throw std::out_of_range("position " + std::to_string(positions[t]) +
                                        " lies outside its request");
            tables.push_back(step.tables + r * step.pages);
            // Few tokens on many threads: the keys of each are taken in parts.
            int64_t n = 1;
            if (step.tokens < 2 * threads)
                n = std::clamp<int64_t>(seen / kLeastPart, 1, (4 * threads + step.tokens - 1) / step.tokens);
            first_of.push_back(parts.size());
            for (int64_t p = 0; p < n; ++p) {
                const auto cut = [&](int64_t at) { return at == n ? seen : seen * at / n / kRanks * kRanks; };
                parts.push_back({t, cut(p), cut(p + 1)});
            }
        }
    }
    first_of.push_back(parts.size());
    const int64_t bytes = aligned(Scorer::bytes(ops, cache, heads)),
                  tasks = static_cast<int64_t>(parts.size());
    const auto workers = static_cast<int>(std::clamp<int64_t>(tasks, 1, std::max(1, threads)));
    uint8_t* scratch = scratch_of_calls().bytes(bytes * workers);
    const bool apart = parts.size() > static_cast<size_t>(step.tokens);
    std::vector<Best> best(apart ? parts.size() : static_cast<size_t>(workers));
    std::vector<NotFinite> bad(parts.size(), NotFinite{-1, 0, 0.0f});

    const auto write = [&](Best& of_token, int64_t t) {
        int64_t* to = out + t * width;
        int64_t* const end = to + width;
        for (const Candidate& c : of_token.sorted()) {
            for (int64_t i = 0; i < cache.pool; ++i) *to++ = c.index * cache.pool + i;
        }
        if (tail) {
            for (int64_t p = (positions[t] + 1) / cache.pool * cache.pool; p <= positions[t]; ++p) *to++ = p;
        }
        std::fill(to, end, int64_t{-1});
    };
    // Lists are made before the team starts: nothing in it may throw.
    for (Best& b : best) b.start(count);
#pragma omp parallel num_threads(workers)
    {
        Scorer scorer(ops, cache, heads, scratch + omp_get_thread_num() * bytes);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; ++i) {
            const Part& part = parts[static_cast<size_t>(i)];
            Best& mine = best[apart ? static_cast<size_t>(i) : static_cast<size_t>(omp_get_thread_num())];
            mine.start(count);
            scorer.query(query + part.token * heads * cache.size * plain_bytes(type), type,
                         weights + part.token * heads);
            for (int64_t from = part.from; from < part.end; from += kRanks) {
                const int64_t some = std::min(kRanks, part.end - from);
                const float* scores = scorer.scores(tables[static_cast<size_t>(part.token)], from, some);
                if (!finite(scores, some)) {
                    const float* first =
                        std::find_if(scores, scores + some, [](float x) { return !std::isfinite(x); });
                    bad[static_cast<size_t>(i)] = {part.token, from + (first - scores), *first};
                    break;
                }
                mine.offer(scores, some, from);
            }
            if (!apart) write(mine, part.token);
        }
    }
    for (const NotFinite& b : bad) {
        if (b.token >= 0) return b;
    }
    for (int64_t t = 0; apart && t < step.tokens; ++t) {
        Best& all = best[first_of[static_cast<size_t>(t)]];
        for (size_t i = first_of[static_cast<size_t>(t)] + 1; i < first_of[static_cast<size_t>(t) + 1]; ++i)
            all.join(best[i]);
        write(all, t);
    }
    return std::nullopt;
}

}  // namespace hadron
