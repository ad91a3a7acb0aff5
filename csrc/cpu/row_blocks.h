// A group of queries over rows, block by block, with the softmax brought along.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "cached_rows.h"

namespace hadron {

inline int64_t aligned(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

// What a group has gathered so far.
struct Mixed {
    float *mixed, *maxima, *sums;

    static int64_t bytes(int64_t columns) { return (mixed_columns(columns) + 2) * kGroup * 4; }

    Mixed(uint8_t* memory, int64_t columns)
        : mixed(reinterpret_cast<float*>(memory)),
          maxima(mixed + mixed_columns(columns) * kGroup),
          sums(maxima + kGroup) {}

    void clear(int64_t columns) {
        std::memset(mixed, 0, static_cast<size_t>(bytes(columns)));
        std::fill(maxima, maxima + kGroup, -std::numeric_limits<float>::infinity());
    }
};

class RowBlocks {
  public:
    // Bytes of scratch.
    static int64_t bytes(const LaneOps& ops, Plain type, int64_t width, int64_t columns, bool fp8 = false) {
        const RowOps& row = rows_of(ops, type);
        return aligned(row.query_bytes(width)) + aligned(row.value_bytes(columns)) +
               (kRanks + 1) * kGroup * 4 +
               (fp8 || widens(ops, type) ? aligned(kRanks * (width + columns) * 4) : 0);
    }

    // width: elements of a key; columns: of a value; scale: of the scores. fp8: how keys, which begin with
    // their values, become numbers of `type`; null: they are.
    RowBlocks(const LaneOps& ops, Plain type, int64_t width, int64_t columns, float scale, uint8_t* scratch,
              const CachedRows* fp8 = nullptr)
        : ops_(ops),
          row_(rows_of(ops, type)),
          fp8_(fp8),
          type_(type),
          width_(width),
          columns_(columns),
          scale_(scale) {
        queries_ = scratch;
        values_ = queries_ + aligned(row_.query_bytes(width));
        scores_ = reinterpret_cast<float*>(values_ + aligned(row_.value_bytes(columns)));
        alpha_ = scores_ + kRanks * kGroup;
        wide_ = alpha_ + kGroup;
    }

    void queries(const float* q, int64_t stride, int64_t count) {
        row_.pack_queries(q, stride, count, width_, queries_);
    }

    // Rows 0 .. count-1 join `to`. values: rows that begin with a value. limits: how many of the rows each
    // lane sees.
    void run(const uint8_t* const* keys, const uint8_t* const* values, int64_t count, const int64_t* limits,
             Mixed& to) {
        for (int64_t from = 0; from < count; from += kRanks) {
            const int64_t some = std::min(kRanks, count - from);
            int64_t seen[kGroup];
            if (limits != nullptr) {
                for (int64_t i = 0; i < kGroup; ++i) seen[i] = limits[i] - from;
            }
            const uint8_t* key[kRanks];
            const uint8_t* value[kRanks];
            const bool same = keys == values;
            rows(keys + from, some, width_, wide_, key);
            if (!same) rows(values + from, some, columns_, wide_ + kRanks * width_, value);
            const int64_t whole = (some + kRows - 1) / kRows * kRows;
            for (int64_t i = some; i < whole; ++i) key[i] = key[some - 1];
            row_.dots(queries_, key, whole, width_, scores_);
            ops_.weigh(scores_, some, limits ? seen : nullptr, scale_, to.maxima, to.sums, alpha_);
            row_.pack_values(same ? key : value, some, columns_, values_);
            row_.mix(values_, scores_, some, columns_, alpha_, to.mixed);
        }
    }

    static const RowOps& rows_of(const LaneOps& ops, Plain type) {
        return type == Plain::bf16 && ops.half != nullptr ? *ops.half : ops.full;
    }
    static bool widens(const LaneOps& ops, Plain type) { return type != Plain::f32 && ops.half == nullptr; }

  private:
    void rows(const uint8_t* const* from, int64_t count, int64_t n, float* wide, const uint8_t** to) const {
        if (fp8_ != nullptr) {
            const int64_t bytes = n * plain_bytes(type_);
            for (int64_t i = 0; i < count; ++i) {
                uint8_t* row = reinterpret_cast<uint8_t*>(wide) + i * bytes;
                fp8_->widen(from[i], row);
                to[i] = row;
            }
            return;
        }
        if (!widens(ops_, type_)) return (void)std::copy(from, from + count, to);
        for (int64_t i = 0; i < count; ++i) {
            ops_.widen(from[i], type_, n, wide + i * n);
            to[i] = reinterpret_cast<const uint8_t*>(wide + i * n);
        }
    }

    const LaneOps& ops_;
    const RowOps& row_;
    const CachedRows* fp8_;
    Plain type_;
    int64_t width_, columns_;
    float scale_;
    uint8_t *queries_, *values_;
    float *scores_, *alpha_, *wide_;
};

}  // namespace hadron
