// Values of codes and scales, exactly: one definition for every level.
//
// E2M1, E2M3, E3M2, E4M3, E8M0 after the OCP MX specification v1.0: E4M3 0x7f and 0xff are NaN, E8M0 0 is
// 2^-127 and 255 is NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "weight.h"

namespace hadron {

static inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <class T>
static inline T load(const void* from, int64_t index = 0) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t*>(from) + index * static_cast<int64_t>(sizeof(T)),
                sizeof value);
    return value;
}

static inline float bf16_value(uint16_t bits) {
    return from_bits(static_cast<uint32_t>(bits) << 16);
}

// To nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_value(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -tiny : tiny;
}

// A small float with `e` exponent bits of that bias and `m` mantissa bits, without infinities or NaN.
static inline float minifloat(uint32_t code, int e, int m, int bias) {
    const uint32_t mantissa = code & ((1u << m) - 1u), exponent = (code >> m) & ((1u << e) - 1u);
    const bool negative = (code >> (e + m)) & 1u;
    const float scale =
        from_bits(static_cast<uint32_t>((exponent ? static_cast<int>(exponent) : 1) - bias - m + 127) << 23);
    const float value = static_cast<float>(exponent ? mantissa + (1u << m) : mantissa) * scale;
    return negative ? -value : value;
}

static inline float e4m3_value(uint32_t code) {
    return (code & 0x7fu) == 0x7fu ? std::numeric_limits<float>::quiet_NaN() : minifloat(code, 4, 3, 7);
}

static inline float e8m0_value(uint32_t code) {
    if (code == 255u) return std::numeric_limits<float>::quiet_NaN();
    return code == 0u ? 0x1p-127f : from_bits(code << 23);
}

// The value of one code; int4 codes are stored plus 8.
static inline float code_value(Element element, uint32_t code) {
    switch (element) {
        case Element::e4m3:
            return e4m3_value(code);
        case Element::e2m1:
            return minifloat(code, 2, 1, 1);
        case Element::e2m3:
            return minifloat(code, 2, 3, 1);
        case Element::e3m2:
            return minifloat(code, 3, 2, 3);
        case Element::int8:
            return static_cast<float>(static_cast<int8_t>(code));
        case Element::int4:
            return static_cast<float>(static_cast<int>(code) - 8);
        case Element::bf16:
            return bf16_value(static_cast<uint16_t>(code));
        case Element::f16:
            return f16_value(static_cast<uint16_t>(code));
        case Element::f32:
            return from_bits(code);
    }
    return 0.0f;
}

static inline float scale_value(const Weight& w, int64_t index) {
    switch (w.scale_type) {
        case ScaleType::f32:
            return load<float>(w.scales, index);
        case ScaleType::f16:
            return f16_value(load<uint16_t>(w.scales, index));
        case ScaleType::bf16:
            return bf16_value(load<uint16_t>(w.scales, index));
        case ScaleType::e8m0:
            return e8m0_value(w.scales[index]);
        case ScaleType::e4m3:
            return e4m3_value(w.scales[index]);
    }
    return 0.0f;
}

static inline int code_bits(Element element) {
    switch (element) {
        case Element::f32:
            return 32;
        case Element::f16:
        case Element::bf16:
            return 16;
        case Element::e4m3:
        case Element::int8:
            return 8;
        case Element::e2m3:
        case Element::e3m2:
            return 6;
        case Element::e2m1:
        case Element::int4:
            return 4;
    }
    return 0;
}

// Factor on the finished sum of a row: its own scale, or the tensor's, times the global one.
static inline float row_scale(const Weight& w, int64_t row) {
    float scale = w.global_scale;
    if (w.granularity == Granularity::tensor) scale *= load<float>(w.scales);
    if (w.granularity == Granularity::channel) scale *= load<float>(w.scales, row);
    return scale;
}

}  // namespace hadron
