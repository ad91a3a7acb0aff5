// What every file of bindings shares: addresses as integers, and the level as a value that Python holds.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "level.h"

namespace hadron {

// The level in use, not ambient state.
struct LevelHandle {
    const Kernels* kernels;
};

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace hadron
