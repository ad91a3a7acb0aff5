// What a request changes about its row of logits before a token is chosen: penalties, biases, ids that may
// not come.
//
// A row is changed where it lies, by its own rules alone. Where a product is followed by a sum both are
// float64, in which the product of two float32 is exact: no compiler's choice of instructions changes a bit.
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr int kWordIds = 32;  // ids of a word of `allowed`

// As `kernels/cpu/lm_head.py` packs them; addresses of int64 ids, float32 counts and biases, uint32 words.
struct RowRules {
    float repetition, frequency, presence, unused;
    int64_t seen, counts, seen_count;
    int64_t biased, bias, biased_count;
    int64_t banned, banned_count;
    int64_t allowed;  // 0: all
    int64_t only;     // -1: none
};

template <class T>
const T* from(int64_t address) {
    return at<const T>(static_cast<uintptr_t>(address));
}

void check_ids(const int64_t* ids, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= size) throw std::out_of_range("a token id is out of range");
    }
}

// Lowest unless it is not finite: no rule hides a fault of the model. By its bits, so that loops vectorize.
void ban(float& logit) {
    uint32_t bits;
    std::memcpy(&bits, &logit, sizeof bits);
    bits = (bits & 0x7fffffff) < 0x7f800000 ? std::bit_cast<uint32_t>(kLowest) : bits;
    std::memcpy(&logit, &bits, sizeof bits);
}

void penalize(float* row, const RowRules& rules) {
    const auto* ids = from<const int64_t>(rules.seen);
    const auto* counts = from<const float>(rules.counts);
    const double repetition = rules.repetition, frequency = rules.frequency, presence = rules.presence;
    for (int64_t i = 0; i < rules.seen_count; ++i) {
        float& logit = row[ids[i]];
        if (!std::isfinite(logit)) continue;
        const double own = logit, count = counts[i];
        const double value = logit > 0 ? own / repetition : own * repetition;
        logit = static_cast<float>(value - (count > 0 ? count * frequency + presence : 0.0));
    }
}

void only_one(float* row, int64_t size, int64_t id) {
    const float kept = row[id];
    for (int64_t i = 0; i < size; ++i) ban(row[i]);
    row[id] = kept;
}

// allowed: which ids may come. Those that are banned besides may not, unless nothing were left.
void mask(float* row, int64_t size, const uint32_t* allowed, const int64_t* banned, int64_t banned_count) {
    int64_t left = 0;
    for (int64_t first = 0; first < size; first += kWordIds, ++allowed) {
        const int64_t ids = std::min<int64_t>(kWordIds, size - first);
        const uint32_t word = ids < kWordIds ? *allowed & ((1u << ids) - 1) : *allowed;
        left += std::popcount(word);
        if (word == ~0u) continue;
        if (word == 0) {  // as nearly all words of a grammar are: a loop that vectorizes
            for (int64_t i = 0; i < ids; ++i) ban(row[first + i]);
            continue;
        }
        for (int64_t i = 0; i < ids; ++i) {
            if ((word >> i & 1) == 0) ban(row[first + i]);
        }
    }
    allowed -= (size + kWordIds - 1) / kWordIds;
    for (int64_t i = 0; i < banned_count; ++i)
        left -= allowed[banned[i] / kWordIds] >> banned[i] % kWordIds & 1;
    for (int64_t i = 0; left > 0 && i < banned_count; ++i) ban(row[banned[i]]);
}

void apply(float* row, int64_t size, const RowRules& rules) {
    penalize(row, rules);
    const auto* biased = from<const int64_t>(rules.biased);
    const auto* bias = from<const float>(rules.bias);
    for (int64_t i = 0; i < rules.biased_count; ++i) row[biased[i]] += bias[i];
    const auto* banned = from<const int64_t>(rules.banned);
    if (rules.only >= 0) {
        only_one(row, size, rules.only);
    } else if (rules.allowed != 0) {
        mask(row, size, from<const uint32_t>(rules.allowed), banned, rules.banned_count);
    } else {
        for (int64_t i = 0; i < rules.banned_count; ++i) ban(row[banned[i]]);
    }
}

}  // namespace

void bind_logit_rules(nb::module_& m) {
    m.def("rule_logits", [](uintptr_t logits, int64_t held, uintptr_t numbers, int64_t rows, int64_t size,
                            nb::bytes packed, int threads) {
        if (packed.size() != static_cast<size_t>(rows) * sizeof(RowRules))
            throw std::invalid_argument("every row of logits has its rules");
        const auto* asked = at<const int64_t>(numbers);
        std::vector<RowRules> rules(static_cast<size_t>(rows));
        std::memcpy(rules.data(), packed.data(), packed.size());
        int64_t work = 0;
        for (int64_t r = 0; r < rows; ++r) {
            const RowRules& own = rules[r];
            if (asked[r] < 0 || asked[r] >= held) throw std::out_of_range("a row of logits is out of range");
            check_ids(from<const int64_t>(own.seen), own.seen_count, size);
            check_ids(from<const int64_t>(own.biased), own.biased_count, size);
            check_ids(from<const int64_t>(own.banned), own.banned_count, size);
            if (own.only >= size) throw std::out_of_range("a token id is out of range");
            work += own.allowed != 0 || own.only >= 0 ? size : own.seen_count + own.biased_count;
        }
        nb::gil_scoped_release release;
        const int team = team_for(threads, work, rows);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
        for (int64_t r = 0; r < rows; ++r) apply(at<float>(logits) + asked[r] * size, size, rules[r]);
    });
}
