// The level `avx512`: the products of `avx2`, compiled for twice as many registers.
#include "avx2_rows.h"

namespace hadron::avx512 {

constinit const Kernels kKernels = {
    "avx512",   avx2::order,          avx2::prepared_bytes,      avx2::prepare, avx2::scratch_bytes,
    avx2::rows, avx2::portable::gate, avx2::portable::dequantize};

}  // namespace hadron::avx512
