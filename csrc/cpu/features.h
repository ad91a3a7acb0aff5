// Which levels this processor runs.
#pragma once

#include <vector>

#include "level.h"

namespace hadron {

// From the narrowest, which always runs, to the widest.
std::vector<const Kernels*> available_levels();

}  // namespace hadron
