// Denormals off while a kernel runs, and the one way in which kernels use threads.
#pragma once

#include <omp.h>

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace aok::AOK_NS {

// Denormal operands read as zero and denormal results become zero until the end of the scope; then the caller's own
// floating-point control is back. The arithmetic of docs/design/bits.md is defined under this mode, which is also what
// VDPBF16PS always does. Rounding is to nearest and exceptions are masked meanwhile, whatever the caller had set.
class FlushDenormals {
public:
#if defined(__x86_64__)
    FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u | 0x8040u); }
    ~FlushDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#endif
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

private:
#if defined(__x86_64__)
    unsigned saved_;
#elif defined(__aarch64__)
    uint64_t saved_;
#endif
};

// body(i) for every i in [0, count) on up to `threads` threads, in contiguous equal shares, denormals off. A count or a
// thread number of one stays on the caller's thread. The split must not decide bits.
template <class Body>
AOK_INLINE void parallel_for(int64_t count, int64_t threads, const Body& body) {
    if (threads > count) threads = count;
    if (threads <= 1) {
        const FlushDenormals guard;
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
        const FlushDenormals guard;
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t i = count * me / team; i < count * (me + 1) / team; ++i) body(i);
    }
}

// take() hands out the numbers 0, 1, 2, ... once each, to any thread.
class Tasks {
public:
    int64_t operator()() const { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }
    // What a call would give now; another thread may be quicker.
    int64_t peek() const { return __atomic_load_n(&next_, __ATOMIC_RELAXED); }

private:
    mutable int64_t next_ = 0;
};

// body(take) on up to `threads` threads, denormals off: each takes numbers until they reach `count`. For tasks of
// unequal length. Who computes what must not decide bits.
template <class Body>
AOK_INLINE void parallel_tasks(int64_t count, int64_t threads, const Body& body) {
    const Tasks take;
    if (threads > count) threads = count;
    if (threads <= 1) {
        const FlushDenormals guard;
        if (count > 0) body(take);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
        const FlushDenormals guard;
        body(take);
    }
}

// Threads worth waking for `work` units when one thread does `grain` of them in about ten microseconds.
AOK_INLINE int64_t threads_for(int64_t work, int64_t grain, int64_t threads) {
    const int64_t worth = work / grain;
    return worth < 1 ? 1 : (worth < threads ? worth : threads);
}

}  // namespace aok::AOK_NS
