// The level `avx512`: portable source, compiled for it.
#include "formats.h"
#include "level.h"

namespace hadron::avx512 {
namespace {
#include "portable.inc"
}  // namespace

constinit const Kernels kKernels = {"avx512",      order, prepared_bytes, prepare,
                                    scratch_bytes, rows,  gate,           dequantize};

}  // namespace hadron::avx512
