// A matrix [rows, columns] as it lies in a mapped checkpoint, and how to read it.
//
// Pointers may be unaligned and their owner outlives every call. Plain data: bound once when a model is
// loaded, passed by reference to every product.
#pragma once

#include <cstdint>
#include <cstring>

// Headers are compiled once for every instruction-set level. A shared inline function would be kept once,
// from whichever level the linker met first, and run on processors that do not have it: so none is shared.
// Under a sanitizer its checks, inlined everywhere, take compilers more memory and time than there is.
#ifdef HADRON_SANITIZED
#define HADRON_LOCAL inline
#else
#define HADRON_LOCAL __attribute__((always_inline)) inline
#endif

namespace hadron {

// Format of one code.
enum class Element : uint8_t { f32, f16, bf16, e4m3, e2m1, e2m3, e3m2, int8, int4 };

// Extent of one scale. tensor and channel are applied to finished sums, block and group inside them.
enum class Granularity : uint8_t { none, tensor, channel, block, group };

// Storage of group scales; all other scales are float32.
enum class ScaleType : uint8_t { f32, f16, bf16, e8m0, e4m3 };

struct Weight {
    Element element;
    Granularity granularity;
    ScaleType scale_type;
    int64_t rows;
    int64_t columns;
    int64_t block_rows;     // rows that share a block scale
    int64_t block_columns;  // columns that share a block or group scale
    int64_t first_row;      // place of row 0 within its first block of scales (or word of zero points)
    int64_t row_bytes;      // from one row of codes to the next
    int64_t scale_stride;   // scales from one row (or row of blocks) to the next
    int64_t zero_stride;    // words of zero points from one eight rows to the next
    const uint8_t* codes;
    const uint8_t* scales;  // null: none
    const int32_t* zeros;   // null: symmetric; else packed along rows, plus 8
    const float* bias;      // null: none
    float global_scale;     // multiplies; 1 where there is none
    bool exact;             // activations are not rounded, whatever the element

    // Whether activations are rounded to bfloat16 where a product begins.
    HADRON_LOCAL bool rounds() const { return !exact && element != Element::f32 && element != Element::f16; }

    // Scales of a row begin here (block: of the row of blocks that holds it).
    HADRON_LOCAL int64_t scale_row(int64_t row) const {
        return granularity == Granularity::block ? (first_row + row) / block_rows * scale_stride
                                                 : row * scale_stride;
    }
    // Zero point of a row's group, in code units relative to INT4's zero (stored plus 8).
    HADRON_LOCAL int zero(int64_t row, int64_t group) const {
        const int64_t at = first_row + row;
        uint32_t word;
        std::memcpy(&word, zeros + at / 8 * zero_stride + group, sizeof word);
        return static_cast<int>((word >> (at % 8 * 4)) & 15u) - 8;
    }
};

}  // namespace hadron
