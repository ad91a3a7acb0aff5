#include "lanes.h"

namespace hadron {

const LaneOps& lane_ops(const Kernels& level) {
#if defined(HADRON_X86)
    if (&level == &avx2::kKernels) return avx2::kLaneOps;
    if (&level == &avx512::kKernels) return avx512::kLaneOps;
    if (&level == &avx512_bf16::kKernels) return avx512_bf16::kLaneOps;
#endif
#if defined(HADRON_AMX)
    if (&level == &avx512_amx::kKernels) {
        static const LaneOps ops = [] {
            LaneOps made = avx512_bf16::kLaneOps;
            made.half = &avx512_amx::kHalf;
            return made;
        }();
        return ops;
    }
#endif
    (void)level;
    return baseline::kLaneOps;
}

}  // namespace hadron
