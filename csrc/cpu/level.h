// Instruction-set levels, chosen at run time. Every level registers its functions in a table; the source
// of a level is compiled with the flags of that level and nothing else of the extension is.
#pragma once

#include <cstdint>

#include "weight.h"

namespace hadron {

// Activations of some tokens: their prepared rows, and the same packed where the level wants it.
struct Prepared {
    const uint8_t* const* rows;
    const uint8_t* packed;
    int64_t tokens;
};

// What one level offers for products by a Weight. Activations and results are float32; activations are
// rounded to bfloat16 where a product begins (by float32, float16 and exact weights: not rounded), sums are
// float32, and every sum has one order, whatever the number of tokens and the split of rows.
struct Kernels {
    const char* name;
    // Weights of one order take activations prepared alike.
    int (*order)(const Weight&);
    // Bytes of one prepared row of activations; a multiple of 64.
    int64_t (*prepared_bytes)(const Weight&);
    // Round and reorder x [columns] into `prepared`, 64-byte aligned.
    void (*prepare)(const Weight&, const float* x, uint8_t* prepared);
    // Bytes of scratch that `rows` needs in one thread; a multiple of 64.
    int64_t (*scratch_bytes)(const Weight&, int64_t tokens);
    // y[t][first .. last) = token t times those rows of the weight, plus bias.
    void (*rows)(const Weight&, const Prepared& x, int64_t first, int64_t last, float* const* y,
                 uint8_t* scratch);
    // h[0 .. n) = silu(min(g, limit)) * clamp(u, -limit, limit); an infinite limit clamps nothing.
    void (*gate)(const float* g, const float* u, float limit, int64_t n, float* h);
    // Row `row` of the weight as float32 [columns].
    void (*dequantize)(const Weight&, int64_t row, float* out);
    // Bytes of `tokens` prepared rows packed together, a multiple of 64; 0: `rows` takes them as they are.
    // Null: it always does.
    int64_t (*packed_bytes)(const Weight&, int64_t tokens) = nullptr;
    // One of `parts` equal shares of packing. Weights of one order take activations packed alike.
    void (*pack)(const Weight&, const uint8_t* const* rows, int64_t tokens, int64_t part, int64_t parts,
                 uint8_t* packed) = nullptr;

    HADRON_LOCAL int64_t bytes_packed(const Weight& w, int64_t tokens) const {
        return packed_bytes ? packed_bytes(w, tokens) : 0;
    }
};

namespace baseline {
extern const Kernels kKernels;
}
#if defined(HADRON_X86)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
#endif
#if defined(HADRON_AMX)
namespace avx512_amx {
extern const Kernels kKernels;
}
#endif

}  // namespace hadron
