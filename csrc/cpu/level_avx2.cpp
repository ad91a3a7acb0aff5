// The level `avx2`.
#include "avx2_rows.h"

namespace hadron::avx2 {

constinit const Kernels kKernels = {"avx2",        order, prepared_bytes, prepare,
                                    scratch_bytes, rows,  portable::gate, portable::dequantize};

}  // namespace hadron::avx2
