// Memory of one kernel call, and the small integer arithmetic of sizes.
#pragma once

#include <cstdlib>
#include <cstring>

#include "simd.h"

namespace aok::AOK_NS {

AOK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
AOK_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
AOK_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AOK_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Cache-line aligned, uninitialised. The process ends when there is none left: nothing could be computed.
template <class T>
class Array {
public:
    Array() = default;
    explicit Array(int64_t count) { allocate(count); }
    ~Array() { std::free(base_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    void allocate(int64_t count) {
        base_ = std::aligned_alloc(64, static_cast<size_t>(round_up(larger(count, 1) * int64_t{sizeof(T)}, 64)));
        if (base_ == nullptr) std::abort();
    }
    void allocate_zeroed(int64_t count) {
        base_ = std::calloc(static_cast<size_t>(count), sizeof(T));
        if (base_ == nullptr) std::abort();
    }
    bool allocated() const { return base_ != nullptr; }
    T* data() const { return static_cast<T*>(base_); }
    T& operator[](int64_t i) const { return data()[i]; }

private:
    void* base_ = nullptr;
};

}  // namespace aok::AOK_NS
