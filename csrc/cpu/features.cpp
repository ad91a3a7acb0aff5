#include "features.h"

#include <cstring>

#if defined(HADRON_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hadron {

namespace {

#if defined(HADRON_X86)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#if defined(HADRON_AMX)
// And GFNI, which every processor with tiles has. Tiles are large, so Linux gives them to processes that ask;
// a kernel before 5.16 does not know the question.
bool has_tiles() {
#if defined(__linux__)
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kGfni = 1u << 8;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBf16) != 0 && (d & kTile) != 0 &&
           (d & kInt8) != 0 && (c & kGfni) != 0 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> available_levels() {
    std::vector<const Kernels*> levels = {&baseline::kKernels};
#if defined(HADRON_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        levels.push_back(&avx2::kKernels);
    if (has_avx512()) levels.push_back(&avx512::kKernels);
    if (has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")) {
        levels.push_back(&avx512_bf16::kKernels);
#if defined(HADRON_AMX)
        if (has_tiles()) levels.push_back(&avx512_amx::kKernels);
#endif
    }
#endif
    return levels;
}

}  // namespace hadron
