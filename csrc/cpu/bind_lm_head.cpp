// What is asked of rows of logits: the best of each, the sum of its exponentials, a token drawn among the
// best, and the ranks of given ids.
//
// A row is taken in blocks of one size, put together in order: bits do not depend on rows or threads. The sum
// is most of the work, and left out where nobody asks for it.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr int64_t kBlock = 4096;  // logits; a multiple of kPeakGroup
constexpr int64_t kFurther = 16;  // times as many as before are looked at where a draw needs more
constexpr int64_t kSumCost = 8;   // multiplications that a logit of a sum is worth

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

// The logarithm of the sum of exp((x - largest) / temperature).
double log_sum(const LogitsSum* blocks, int64_t count, double temperature) {
    float largest = blocks[0].largest;
    for (int64_t b = 1; b < count; ++b) largest = std::max(largest, blocks[b].largest);
    double total = 0.0;
    for (int64_t b = 0; b < count; ++b) {
        total += blocks[b].sum * std::exp((static_cast<double>(blocks[b].largest) - largest) / temperature);
    }
    return std::log(total);
}

// The `count` best of a row, in order. peaks: [n], of its groups; what lies in a column whose peak is below
// the count-th largest peak cannot be among them, so few columns are looked at. list: scratch.
void best_of_row(const float* row, int64_t size, const float* peaks, int64_t n, int64_t count,
                 std::vector<int32_t>& list, std::vector<float>& order, int64_t* ids, float* values) {
    float least = -std::numeric_limits<float>::max();
    if (count == 1) {
        least = *std::max_element(peaks, peaks + n);
    } else if (count < n) {
        order.assign(peaks, peaks + n);
        std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<float>());
        least = order[count - 1];
    }
    list.clear();
    int64_t ties = 0;  // at `least`: behind enough of them no group has one whose id is low enough
    for (int64_t first = 0; first < n; first += kPeakColumns) {
        const int64_t group = first / kPeakColumns * kPeakGroup, end = std::min(group + kPeakGroup, size);
        const bool enough = ties >= count;
        for (int64_t column = 0; column < kPeakColumns; ++column) {
            const float peak = peaks[first + column];
            if (peak < least || (enough && peak == least)) continue;
            for (int64_t i = group + column; i < end; i += kPeakColumns) {
                if (row[i] < least || (enough && row[i] == least)) continue;
                list.push_back(static_cast<int32_t>(i));
                ties += row[i] == least;
            }
        }
    }
    for (int32_t i = 0; static_cast<int64_t>(list.size()) < count; ++i) list.push_back(i);  // not finite
    std::partial_sort(list.begin(), list.begin() + count, list.end(), Before{row});
    for (int64_t i = 0; i < count; ++i) {
        ids[i] = list[i];
        values[i] = row[list[i]];
    }
}

// Of `rows` rows by their numbers, or the first ones where `numbers` is null: ids and values [rows][count];
// faults [rows]; sums [rows] at a temperature, unless null.
void best(const SmallOps& ops, const float* logits, const int64_t* numbers, int64_t rows, int64_t size,
          int64_t count, int64_t* ids, float* values, double temperature, double* sums, int64_t* faults,
          int threads) {
    // of a temperature near 0 all but the largest vanish long before this
    const auto inverse = static_cast<float>(std::min(1.0 / temperature, 1e30));
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    const int64_t width = kBlock / kPeakGroup * kPeakColumns;  // peaks of a block
    const int64_t peaks_of_row = (size + kPeakGroup - 1) / kPeakGroup * kPeakColumns;
    const int team = team_for(threads, rows * size * (sums != nullptr ? kSumCost : 1), rows * blocks);
    std::vector<LogitsSum> parts(static_cast<size_t>(sums != nullptr ? rows * blocks : 0));
    std::vector<int64_t> found(static_cast<size_t>(rows * blocks));
    std::vector<float> peaks(static_cast<size_t>(rows * blocks * width));
    const auto row_of = [&](int64_t r) { return logits + (numbers != nullptr ? numbers[r] : r) * size; };
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * blocks; ++i) {
            const float* row = row_of(i / blocks);
            const int64_t first = i % blocks * kBlock, end = std::min(first + kBlock, size);
            found[i] = ops.peaks_block(row + first, end - first, peaks.data() + i * width);
            if (sums != nullptr) ops.sum_block(row + first, end - first, inverse, &parts[i]);
        }
        std::vector<int32_t> list;
        std::vector<float> order;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) {
            faults[r] = 0;
            for (int64_t b = 0; b < blocks; ++b) faults[r] += found[r * blocks + b];
            best_of_row(row_of(r), size, peaks.data() + r * blocks * width, peaks_of_row, count, list, order,
                        ids + r * count, values + r * count);
            if (sums != nullptr) sums[r] = log_sum(&parts[r * blocks], blocks, temperature);
        }
    }
}

// How a token is drawn: as the definition's columns.
struct Chance {
    double temperature, top_p, min_p, number;
};

// The token of a row by chance, -1 where it may be one that is not given. values: the likeliest, in order.
// log_sum: of the whole row, null where these are all. passed: scratch [count].
int64_t drawn(const int64_t* ids, const float* values, int64_t count, const Chance& chance,
              const double* log_sum, double* passed) {
    int64_t last = -1;  // the last that may come: the first always, then while top_p is not reached
    double all = 0.0, least = 0.0;
    const auto weight = [&](int64_t i) {
        return std::exp((static_cast<double>(values[i]) - static_cast<double>(values[0])) /
                        chance.temperature);
    };
    for (int64_t i = 0; i < count; ++i) {
        const double own = weight(i);
        all += own;
        passed[i] = all;
        if (i > 0 && last < 0 && own < chance.min_p) last = i - 1;
    }
    if (last < 0) last = count - 1;
    if (log_sum != nullptr) least = std::exp(*log_sum);
    const double total = all > least ? all : least;
    for (int64_t i = 0; i < last; ++i) {
        if (!(passed[i] < chance.top_p * total)) last = i;
    }
    const bool all_may = chance.top_p == 1.0 && chance.min_p == 0.0, open = log_sum != nullptr;
    const double below = chance.number * (open && all_may ? total : passed[last]);
    int64_t at = 0;
    while (at < count && passed[at] <= below) ++at;
    if (open && (at == count || (!all_may && last + 1 == count))) return -1;
    return ids[std::min(at, last)];
}

// A token of each row by chance. ids, values [rows][count]: its likeliest; where the token may be one behind
// them, more are looked for. sums: as `drawn` takes it, null where no others may come.
void draw(const SmallOps& ops, const float* logits, const int64_t* numbers, int64_t rows, int64_t size,
          const int64_t* ids, const float* values, int64_t count, const Chance* chances, const double* sums,
          int64_t* tokens, int threads) {
    std::vector<double> passed(static_cast<size_t>(count));
    std::vector<int64_t> open;
    for (int64_t r = 0; r < rows; ++r) {
        tokens[r] = drawn(ids + r * count, values + r * count, count, chances[r],
                          sums != nullptr ? sums + r : nullptr, passed.data());
        if (tokens[r] < 0) open.push_back(r);
    }
    const int64_t left = static_cast<int64_t>(open.size());
    const int team = team_for(threads, left * size, left);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < left; ++i) {
        const int64_t r = open[i];
        std::vector<int64_t> more_ids;
        std::vector<float> more_values;
        std::vector<double> more_passed;
        for (int64_t more = count; tokens[r] < 0;) {
            more = std::min(more * kFurther, size);
            more_ids.resize(more);
            more_values.resize(more);
            more_passed.resize(more);
            int64_t faults;
            best(ops, logits, numbers + r, 1, size, more, more_ids.data(), more_values.data(), 1.0, nullptr,
                 &faults, 1);
            tokens[r] = drawn(more_ids.data(), more_values.data(), more, chances[r],
                              more < size ? sums + r : nullptr, more_passed.data());
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

// numbers: of rows; null: the first ones, as `best` has them.
void check_rows(const int64_t* numbers, int64_t rows, int64_t held) {
    for (int64_t i = 0; numbers != nullptr && i < rows; ++i) {
        if (numbers[i] < 0 || numbers[i] >= held) throw std::out_of_range("a row of logits is out of range");
    }
}

}  // namespace

void bind_lm_head(nb::module_& m) {
    m.def("best_logits", [](const LevelHandle& l, uintptr_t logits, int64_t held, uintptr_t numbers,
                            int64_t rows, int64_t size, int64_t count, uintptr_t ids, uintptr_t values,
                            double temperature, uintptr_t sums, uintptr_t faults, int threads) {
        if (size < 1 || size > INT32_MAX || count < 0 || count > size)
            throw std::invalid_argument("so many of so many logits cannot be chosen");
        if (!(temperature > 0)) throw std::invalid_argument("a temperature is above 0");
        const auto* asked = at<const int64_t>(numbers);
        check_rows(asked, rows, held);
        nb::gil_scoped_release release;
        best(small_ops(*l.kernels), at<const float>(logits), asked, rows, size, count, at<int64_t>(ids),
             at<float>(values), temperature, at<double>(sums), at<int64_t>(faults), threads);
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
    m.def("draw_logits", [](const LevelHandle& l, uintptr_t logits, int64_t held, uintptr_t numbers,
                            int64_t rows, int64_t size, uintptr_t ids, uintptr_t values, int64_t count,
                            uintptr_t chances, uintptr_t sums, uintptr_t tokens, int threads) {
        const auto* asked = at<const Chance>(chances);
        if (size > INT32_MAX || count < 1 || count > size)
            throw std::invalid_argument("a token is drawn among one at least, of so many");
        for (int64_t r = 0; r < rows; ++r) {
            if (!(asked[r].temperature > 0)) throw std::invalid_argument("a temperature is above 0");
        }
        check_rows(at<const int64_t>(numbers), rows, held);
        nb::gil_scoped_release release;
        draw(small_ops(*l.kernels), at<const float>(logits), at<const int64_t>(numbers), rows, size,
             at<const int64_t>(ids), at<const float>(values), count, asked, at<const double>(sums),
             at<int64_t>(tokens), threads);
    });
}
