// Rows of a latent cache: numbers of one type; or E4M3 codes of the latent, their float32 scale, and the
// rotated key in bfloat16 behind it.
//
// FP8 rows are widened before they are multiplied, to what the level multiplies fastest: bfloat16 where it
// has dots of that, else float32. A row's values depend on its bytes alone.
#pragma once

#include <cstring>

#include "lanes.h"

namespace hadron {

enum class RowType : uint8_t { f32, bf16, f16, e4m3 };  // the first three as in Plain

class CachedRows {
  public:
    CachedRows(const Kernels& k, RowType type, int64_t rank, int64_t rope)
        : ops_(lane_ops(k)), small_(small_ops(k)), fp8_(type == RowType::e4m3), rank_(rank), rope_(rope) {
        stored_ = fp8_ ? Plain::bf16 : static_cast<Plain>(type);
        type_ = fp8_ && ops_.half == nullptr ? Plain::f32 : stored_;
    }

    bool fp8() const { return fp8_; }
    // Of the numbers of a row, widened if it is FP8.
    Plain type() const { return type_; }
    int64_t bytes() const { return (fp8_ ? rank_ + kScale : rank_ * plain_bytes(stored_)) + key_bytes(); }

    // A row's latent as float32.
    void latent(const uint8_t* row, float* out) const {
        fp8_ ? small_.widen_e4m3(row, scale(row), rank_, Plain::f32, reinterpret_cast<uint8_t*>(out))
             : ops_.widen(row, stored_, rank_, out);
    }

    // A row's key as numbers of `type()`.
    void key(const uint8_t* row, uint8_t* out) const {
        const uint8_t* from = row + bytes() - key_bytes();
        type_ == stored_ ? (void)std::memcpy(out, from, static_cast<size_t>(key_bytes()))
                         : ops_.widen(from, stored_, rope_, reinterpret_cast<float*>(out));
    }

    // An FP8 row as numbers of `type()`.
    void widen(const uint8_t* row, uint8_t* out) const {
        small_.widen_e4m3(row, scale(row), rank_, type_, out);
        key(row, out + rank_ * plain_bytes(type_));
    }

    // An FP8 row from its latent and key.
    void store(const float* row, uint8_t* out) const {
        const float scale = small_.narrow_e4m3(row, rank_, out);
        std::memcpy(out + rank_, &scale, sizeof scale);
        ops_.narrow(row + rank_, stored_, rope_, out + rank_ + kScale);
    }

  private:
    static constexpr int64_t kScale = 4;  // bytes

    float scale(const uint8_t* row) const {
        float value;
        std::memcpy(&value, row + rank_, sizeof value);  // at any address
        return value;
    }
    int64_t key_bytes() const { return rope_ * plain_bytes(stored_); }

    const LaneOps& ops_;
    const SmallOps& small_;
    bool fp8_;
    Plain stored_, type_;  // stored_: of plain rows, and of the key of an FP8 row
    int64_t rank_, rope_;
};

}  // namespace hadron
