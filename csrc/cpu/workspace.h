// Memory that a call needs and the next one reuses: grows, never shrinks, 64-byte aligned.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace hadron {

class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { std::free(data_); }

    uint8_t* bytes(int64_t size) {
        if (size > size_) {
            std::free(data_);
            size_ = (size + 4095) / 4096 * 4096;
            data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(size_)));
            if (data_ == nullptr) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return data_;
    }

    float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }

  private:
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace hadron
