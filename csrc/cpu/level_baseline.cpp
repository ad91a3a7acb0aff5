// The level `baseline`: portable source, compiled for it.
#include "formats.h"
#include "level.h"

namespace hadron::baseline {
namespace {
#include "portable.inc"
}  // namespace

constinit const Kernels kKernels = {"baseline",    order, prepared_bytes, prepare,
                                    scratch_bytes, rows,  gate,           dequantize};

}  // namespace hadron::baseline
