// Emulation of declared activation quantization: a scale for a tensor, a token or a group, then the grid.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.h"
#include "ops.h"

namespace nb = nanobind;
using namespace hadron;

namespace {

constexpr int64_t kCost = 8;  // multiplications that an element is worth

//                    mantissa, smallest, most, least, integer
constexpr Grid kE2M1 = {1, 0, 6.0f, -6.0f, false}, kE2M3 = {3, 0, 7.5f, -7.5f, false};
constexpr Grid kE3M2 = {2, -2, 28.0f, -28.0f, false}, kE4M3 = {3, -6, 448.0f, -448.0f, false};
constexpr Grid kInt8 = {0, 0, 127.0f, -128.0f, true};

enum class ScaleKind { stored, floating, e8m0, e4m3 };
enum class Mode { even, floor, ceil };

// An ActivationScheme. columns: of a group; 0: the whole row, and -1 all rows together.
struct Activation {
    Grid grid;
    ScaleKind kind;
    int64_t columns;
    Mode mode;
    bool reciprocal;
    std::optional<float> stored;
};

template <class Value>
Value word(const std::string& given, std::initializer_list<std::pair<const char*, Value>> words) {
    for (const auto& [name, value] : words) {
        if (given == name) return value;
    }
    throw std::invalid_argument("unknown word: " + given);
}

// A power of two; the modes differ in how its exponent comes from the group's largest.
float power_of_two(const Activation& a, float amax) {
    if (amax != amax) return amax;
    uint32_t bits;
    std::memcpy(&bits, &amax, sizeof bits);
    if (a.mode == Mode::even) bits += 1u << (22 - a.grid.mantissa);
    if (a.mode == Mode::ceil) bits += 0x7fffff;
    const int exponent = static_cast<int>(bits >> 23) - 127 - std::ilogb(a.grid.most);
    return std::ldexp(1.0f, std::clamp(exponent, -127, 127));
}

// An E4M3 scale under the tensor's: its multiplier, or the reciprocal of that.
float scale_of_scale(const SmallOps& ops, const Activation& a, float amax, float global) {
    if (amax == 0.0f) return 0.0f;
    float scale = a.reciprocal ? global * (amax / a.grid.most) : amax / (a.grid.most * global);
    ops.to_grid(&scale, 1, 1.0f, kE4M3, &scale);
    return a.reciprocal ? scale / global : scale * global;
}

// The largest magnitude of everything; NaN where one is NaN.
float whole_magnitude(const SmallOps& ops, const float* x, int64_t rows, int64_t width, int team) {
    std::vector<float> of_rows(static_cast<size_t>(rows));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; ++r) of_rows[r] = ops.magnitude(x + r * width, width);
    return ops.magnitude(of_rows.data(), rows);
}

void quantize(const SmallOps& ops, const Activation& a, const float* x, int64_t rows, int64_t width, float* y,
              int threads) {
    const int team = team_for(threads, rows * width * kCost, rows);
    float whole = a.stored.value_or(0.0f);
    if (!a.stored && (a.columns < 0 || a.kind == ScaleKind::e4m3)) {
        const float amax = whole_magnitude(ops, x, rows, width, team);
        // Two roundings for the reciprocal, as it is defined.
        whole = a.kind != ScaleKind::e4m3 ? amax / a.grid.most
                : a.reciprocal            ? 1.0f / amax * 2688.0f
                                          : amax / 2688.0f;
    }
    const int64_t columns = a.columns > 0 ? a.columns : width;
    const bool one_scale = a.kind == ScaleKind::stored || a.columns < 0;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < width; c += columns) {
            const float* from = x + r * width + c;
            const int64_t n = std::min(columns, width - c);
            float scale = whole;
            if (!one_scale) {
                const float amax = ops.magnitude(from, n);
                scale = a.kind == ScaleKind::e8m0   ? power_of_two(a, amax)
                        : a.kind == ScaleKind::e4m3 ? scale_of_scale(ops, a, amax, whole)
                                                    : amax / a.grid.most;
            }
            ops.to_grid(from, n, scale, a.grid, y + r * width + c);
        }
    }
}

Activation make_activation(const std::string& element, const std::string& scale, int64_t columns,
                           const std::string& mode, bool reciprocal, std::optional<float> stored) {
    return {word<Grid>(element, {{"fp4_e2m1", kE2M1},
                                 {"fp6_e2m3", kE2M3},
                                 {"fp6_e3m2", kE3M2},
                                 {"fp8_e4m3", kE4M3},
                                 {"int8", kInt8}}),
            word<ScaleKind>(scale, {{"stored", ScaleKind::stored},
                                    {"float", ScaleKind::floating},
                                    {"e8m0", ScaleKind::e8m0},
                                    {"e4m3", ScaleKind::e4m3}}),
            columns,
            word<Mode>(mode, {{"even", Mode::even}, {"floor", Mode::floor}, {"ceil", Mode::ceil}}),
            reciprocal,
            stored};
}

}  // namespace

void bind_quantize(nb::module_& m) {
    nb::class_<Activation>(m, "Activation");
    m.def("activation", &make_activation, nb::arg("element"), nb::arg("scale"), nb::arg("columns"),
          nb::arg("mode"), nb::arg("reciprocal"), nb::arg("stored").none());
    m.def("quantize", [](const LevelHandle& l, const Activation& a, uintptr_t x, int64_t rows, int64_t width,
                         uintptr_t y, int threads) {
        nb::gil_scoped_release release;
        quantize(small_ops(*l.kernels), a, at<const float>(x), rows, width, at<float>(y), threads);
    });
}
