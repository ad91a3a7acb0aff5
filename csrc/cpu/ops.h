// What the drivers of the smaller operations share: how much work is worth a thread, and memory for a call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops_level.h"
#include "workspace.h"

namespace hadron {

constexpr int64_t kWorth = 1 << 16;  // multiplications (about 10 us) below which a thread is not woken

// Threads for so much work, of which at most `parts` can be done at a time.
inline int team_for(int threads, int64_t work, int64_t parts) {
    return static_cast<int>(std::clamp<int64_t>(std::min(work / kWorth, parts), 1, std::max(1, threads)));
}

// Memory of the calling thread that lasts until its next call: taken before threads start, so that a
// failure is an ordinary exception.
inline Workspace& call_memory() {
    thread_local Workspace workspace;
    return workspace;
}

// Floats in a buffer of n, to whole cache lines.
inline int64_t lines(int64_t n) {
    return (n + 15) / 16 * 16;
}

inline Floats floats_at(uintptr_t address, int type) {
    return {reinterpret_cast<const uint8_t*>(address), static_cast<Plain>(type)};
}

}  // namespace hadron
