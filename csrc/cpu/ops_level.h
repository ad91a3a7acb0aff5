// Functions of the smaller operations at one instruction-set level: norms, rope, hyper-connections, router,
// embedding, KDA, rows of an FP8 cache, what is asked of logits, quantization of activations. A second table
// beside Kernels: these have no use for bfloat16 dots, so that level takes the functions of avx512.
//
// A function handles one row, one token or one head, and its result depends on nothing else. What is
// inline here is always inlined: a copy compiled for a wide level must not serve the others.
#pragma once

#include <cstdint>

#include "level.h"

namespace hadron {

constexpr int64_t kMaxStreams = 16;
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kKdaTokens = 32;  // that one call of kda_head takes

// Storage of activations, and of parameters that are no Weight.
enum class Plain : uint8_t { f32, bf16, f16 };

[[gnu::always_inline]] inline int64_t plain_bytes(Plain type) {
    return type == Plain::f32 ? 4 : 2;
}

// Numbers in memory at any address.
struct Floats {
    const uint8_t* data;
    Plain type;
    [[gnu::always_inline]] const uint8_t* from(int64_t index) const {
        return data + index * plain_bytes(type);
    }
};

// Sizes of a hyper-connection site.
struct HyperSizes {
    int64_t streams, hidden;
    int rounds;  // columns and rows are normalised in turn: 2 * rounds - 1 times, columns first and last
    float eps, norm_eps;
};

struct RouterSizes {
    int64_t experts, top_k, groups, topk_groups;
    bool normalize;
    float scaling;
};

// A KDA layer, its parameters as float32 in the order in which they are used.
struct KdaLayer {
    int64_t heads, key, kernel;  // values are as wide as keys; taps of the convolution
    const float* taps;           // [3 (q, k, v)][kernel][width]
    const float* rate;           // [heads]: exp(A_log)
    const float* dt_bias;        // [width]
    const float* norm;           // [key]
    float eps, lower_bound;
    bool bounded;  // the gate is lower_bound * sigmoid, else softplus
};

// Tokens of one request: rows of the step's inputs, and the state they move.
struct KdaRun {
    const uint8_t* q;  // all [tokens, width] in `type`
    const uint8_t* k;
    const uint8_t* v;
    const uint8_t* forget;
    const uint8_t* gate;
    const uint8_t* beta;  // [tokens, heads]
    uint8_t* out;         // [tokens, width]
    Plain type;
    int64_t tokens;
    uint8_t* window;  // [3 * width][kernel - 1], oldest first
    Plain window_type;
    float* state;  // [heads][key][value]
};

// Of a block of logits that are finite: its largest, and the sum of e^(x - largest).
struct LogitsSum {
    float largest;
    double sum;
};

// Logits lie in groups, and those of a group in columns: logit i is of column i % kPeakColumns.
constexpr int64_t kPeakGroup = 1024;
constexpr int64_t kPeakColumns = 16;

// A number format. mantissa: bits; smallest: exponent of the smallest normal number. Integers have neither.
struct Grid {
    int mantissa, smallest;
    float most, least;
    bool integer;
};

struct SmallOps {
    const char* name;
    void (*widen)(const uint8_t* from, Plain type, int64_t n, float* out);
    void (*narrow)(const float* from, Plain type, int64_t n, uint8_t* out);
    // E4M3 codes times their scale, as float32 or bfloat16.
    void (*widen_e4m3)(const uint8_t* codes, float scale, int64_t n, Plain type, uint8_t* out);
    // The codes of x under a scale of its largest magnitude over 448, or 1 where that is 0; the scale.
    float (*narrow_e4m3)(const float* x, int64_t n, uint8_t* codes);
    // x [n] in place: x / sqrt(mean(x^2) + eps), times weight and sigmoid(gate) where they are given.
    void (*rms_norm)(float* x, const Floats* weight, const float* gate, int64_t n, float eps);
    void (*layer_norm)(float* x, const Floats& weight, const Floats& bias, int64_t n, float eps);
    // x [n] in place by cos, sin [n/2].
    void (*rotate)(float* x, const float* cos, const float* sin, int64_t n, bool interleave);
    // y[t * stride + r] = x[t] . row r of a matrix [rows, n], in float32; x [tokens][n].
    void (*products)(const Floats& matrix, int64_t rows, int64_t n, const float* x, int64_t tokens, float* y,
                     int64_t stride);
    // Factor 1 / sqrt(mean(x^2) + eps).
    float (*rms_factor)(const float* x, int64_t n, float eps);
    // The products of a token, times `factor`, become pre, post [m] and comb [m, m].
    void (*mixes)(const float* products, float factor, const float* base, const float* scale,
                  const HyperSizes&, float* pre, float* post, float* comb);
    // out[h] = sum of pre[i] * streams[i][h], columns [first, last).
    void (*collapse)(const float* streams, const float* pre, const HyperSizes&, int64_t first, int64_t last,
                     float* out);
    // out[j][h] = post[j] * block[h] + sum of comb[i][j] * streams[i][h].
    void (*spread)(const float* block, const float* post, const float* comb, const float* streams,
                   const HyperSizes&, int64_t first, int64_t last, float* out);
    // Scores from a token's products, then its experts, ascending, and their weights. scratch: 2 * experts.
    void (*choose)(const float* products, const float* bias, const RouterSizes&, float* scratch, int64_t* ids,
                   float* weights);
    // Bytes of scratch that `kda_head` needs; a multiple of 64.
    int64_t (*kda_scratch)(const KdaLayer&);
    // kKdaTokens tokens from `first` on (fewer at the end) of one head of one request: convolution, gates,
    // recurrence, gated norm. ahead: the state that this thread takes next, or null.
    void (*kda_head)(const KdaLayer&, const KdaRun&, int64_t head, int64_t first, const float* ahead,
                     uint8_t* scratch);
    int64_t (*peaks_block)(const float* x, int64_t n, float* peaks);
    void (*sum_block)(const float* x, int64_t n, float inverse, LogitsSum* out);
    // The largest |x[i]|; NaN where one is NaN.
    float (*magnitude)(const float* x, int64_t n);
    // y[i] = the value of the grid nearest to x[i] / scale, times scale. y may be x.
    void (*to_grid)(const float* x, int64_t n, float scale, const Grid&, float* y);
};

namespace baseline {
extern const SmallOps kSmallOps;
}
#if defined(HADRON_X86)
namespace avx2 {
extern const SmallOps kSmallOps;
}
namespace avx512 {
extern const SmallOps kSmallOps;
}
#endif

// The table that goes with a level.
const SmallOps& small_ops(const Kernels& level);

}  // namespace hadron
