// What is asked of rows of logits: the best of each, its log-sum-exp, and the ranks of given ids.
//
// A row is taken in blocks of one size, put together in order: bits do not depend on rows or threads.
#include <omp.h>

#include <cmath>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr int64_t kBlock = 4096;  // logits
constexpr int64_t kCost = 8;      // multiplications that a logit is worth

// Whether one id of a row comes before another: the larger logit, then the lower id; NaN before all, as a
// sort of torch has it.
struct Before {
    const float* row;
    bool operator()(int32_t a, int32_t b) const {
        const float u = row[a], v = row[b];
        if (u > v || (u != u && v == v)) return true;
        if (u < v || (v != v && u == u)) return false;
        return a < b;
    }
};

// The `count` best of ids [first, end), in no order; returns how many.
int64_t best_of_block(const float* row, int64_t first, int64_t end, int64_t count, int32_t* list) {
    const Before before = {row};
    int64_t have = 0;
    for (int64_t i = first; i < end && count > 0; ++i) {
        const auto id = static_cast<int32_t>(i);
        if (have < count) {
            list[have++] = id;
            if (have == count) std::make_heap(list, list + count, before);  // the worst is in front
        } else if (!(row[id] <= row[list[0]]) && before(id, list[0])) {
            std::pop_heap(list, list + count, before);
            list[count - 1] = id;
            std::push_heap(list, list + count, before);
        }
    }
    return have;
}

double log_sum_exp(const LogitsSum* blocks, int64_t count) {
    float largest = blocks[0].largest;
    for (int64_t b = 1; b < count; ++b) largest = std::max(largest, blocks[b].largest);
    double total = 0.0;
    for (int64_t b = 0; b < count; ++b) {
        total += blocks[b].sum * std::exp(static_cast<double>(blocks[b].largest) - largest);
    }
    return largest + std::log(total);
}

// ids and values [rows][count]; sums and faults [rows].
void best(const SmallOps& ops, const float* logits, int64_t rows, int64_t size, int64_t count, int64_t* ids,
          float* values, double* sums, int64_t* faults, int threads) {
    const int64_t blocks = (size + kBlock - 1) / kBlock, width = std::min(count, kBlock);
    const int team = team_for(threads, rows * size * kCost, rows * blocks);
    std::vector<LogitsSum> parts(static_cast<size_t>(rows * blocks));
    std::vector<int32_t> lists(static_cast<size_t>(rows * blocks * width));
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * blocks; ++i) {
            const float* row = logits + i / blocks * size;
            const int64_t first = i % blocks * kBlock, end = std::min(first + kBlock, size);
            ops.sum_block(row + first, end - first, &parts[i]);
            best_of_block(row, first, end, width, lists.data() + i * width);
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) {
            const float* row = logits + r * size;
            int32_t* list = lists.data() + r * blocks * width;
            // Only the last block has fewer than `width`, so that the lists lie side by side.
            const int64_t last = std::min(width, size - (blocks - 1) * kBlock);
            std::partial_sort(list, list + count, list + (blocks - 1) * width + last, Before{row});
            for (int64_t i = 0; i < count; ++i) {
                ids[r * count + i] = list[i];
                values[r * count + i] = row[list[i]];
            }
            sums[r] = log_sum_exp(&parts[r * blocks], blocks);
            faults[r] = 0;
            for (int64_t b = 0; b < blocks; ++b) faults[r] += parts[r * blocks + b].faults;
        }
    }
}

// ids, ranks [rows][count].
void ranks_of(const float* logits, int64_t rows, int64_t size, const int64_t* ids, int64_t count,
              int64_t* ranks, int threads) {
    const int team = team_for(threads, rows * count * size, rows * count);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < rows * count; ++i) {
        const float* row = logits + i / count * size;
        const float own = row[ids[i]];
        int64_t ahead = 0;
        for (int64_t j = 0; j < size; ++j) ahead += row[j] > own;
        for (int64_t j = 0; j < ids[i]; ++j) ahead += row[j] == own;
        ranks[i] = ahead + 1;
    }
}

}  // namespace

void bind_lm_head(nb::module_& m) {
    m.def("best_logits", [](const LevelHandle& l, uintptr_t logits, int64_t rows, int64_t size, int64_t count,
                            uintptr_t ids, uintptr_t values, uintptr_t sums, uintptr_t faults, int threads) {
        if (size < 1 || size > INT32_MAX || count < 0 || count > size)
            throw std::invalid_argument("so many of so many logits cannot be chosen");
        nb::gil_scoped_release release;
        best(small_ops(*l.kernels), at<const float>(logits), rows, size, count, at<int64_t>(ids),
             at<float>(values), at<double>(sums), at<int64_t>(faults), threads);
    });
    m.def("rank_logits", [](uintptr_t logits, int64_t rows, int64_t size, uintptr_t ids, int64_t count,
                            uintptr_t ranks, int threads) {
        const auto* asked = at<const int64_t>(ids);
        for (int64_t i = 0; i < rows * count; ++i) {
            if (asked[i] < 0 || asked[i] >= size) throw std::out_of_range("a token id is out of range");
        }
        nb::gil_scoped_release release;
        ranks_of(at<const float>(logits), rows, size, asked, count, at<int64_t>(ranks), threads);
    });
}
