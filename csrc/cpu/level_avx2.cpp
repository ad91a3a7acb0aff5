// The level `avx2`: portable source, compiled for it.
#include "formats.h"
#include "level.h"

namespace hadron::avx2 {
namespace {
#include "portable.inc"
}  // namespace

constinit const Kernels kKernels = {"avx2",        order, prepared_bytes, prepare,
                                    scratch_bytes, rows,  gate,           dequantize};

}  // namespace hadron::avx2
