#include "features.h"

#include <cstring>

namespace hadron {

namespace {

#if defined(HADRON_X86)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

}  // namespace

std::vector<const Kernels*> available_levels() {
    std::vector<const Kernels*> levels = {&baseline::kKernels};
#if defined(HADRON_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels.push_back(&avx2::kKernels);
    if (has_avx512()) levels.push_back(&avx512::kKernels);
    if (has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")) {
        levels.push_back(&avx512_bf16::kKernels);
    }
#endif
    return levels;
}

}  // namespace hadron
