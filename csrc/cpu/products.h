// Products over all rows of weights, shared out over threads: `linear`, `mlp`, `moe`.
#pragma once

#include <cstdint>
#include <vector>

#include "level.h"

namespace hadron {

// A gated MLP: down(silu(min(gate x, limit)) * clamp(up x)).
struct GatedMlp {
    const Weight* gate;
    const Weight* up;
    const Weight* down;
    float limit;  // infinite: no clamp
};

// y [tokens, rows] = x [tokens, columns] times the weight, plus bias.
struct Product {
    const Weight* weight;
    const float* x;
    float* y;
};

// Products as one pool of work. What is the same input to several is prepared once for each order of weights.
void linears(const Kernels& kernels, const std::vector<Product>& products, int64_t tokens, int threads);

// y [tokens, hidden] = the MLP of x [tokens, hidden].
void mlp(const Kernels& kernels, const GatedMlp& block, const float* x, int64_t tokens, float* y,
         int threads);

// y [tokens, hidden] = the sum, by ascending expert, of weights[t, i] * experts[ids[t, i]](x[t]), then of
// shared(x[t]) where there is one. ids and weights are [tokens, top_k].
void moe(const Kernels& kernels, const std::vector<GatedMlp>& experts, const GatedMlp* shared, const float* x,
         const int64_t* ids, const float* weights, int64_t tokens, int64_t top_k, int64_t hidden, float* y,
         int threads);

}  // namespace hadron
