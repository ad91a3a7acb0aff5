#include <cstring>

#include "ops_level.h"

namespace hadron {

const SmallOps& small_ops(const Kernels& level) {
#if defined(HADRON_X86)
    if (std::strcmp(level.name, avx2::kSmallOps.name) == 0) return avx2::kSmallOps;
    if (std::strncmp(level.name, avx512::kSmallOps.name, 6) == 0) return avx512::kSmallOps;
#endif
    (void)level;
    return baseline::kSmallOps;
}

}  // namespace hadron
