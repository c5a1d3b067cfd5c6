// Products of cached keys with 16 rows at a time, a row being a head of a query: keys are broadcast as they lie in the
// cache, and every sum of a row stays in its lane.
#pragma once

#include "kv_layout.h"
#include "simd.h"

namespace aok::AOK_NS {

// Keys whose products are accumulated together.
#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
constexpr int kKeys = 16;
#elif defined(AOK_ISA_avx2)
constexpr int kKeys = 4;
#else
constexpr int kKeys = 2;
#endif
static_assert(kPageSlots % kKeys == 0);

// How a pair of key elements meets 16 rows. Query words lie as [word][16 rows]: pairs of bf16 for VDPBF16PS, else fp32.
template <class T>
struct Words {
#if defined(AOK_ISA_avx512_bf16)
    static constexpr bool paired = sizeof(T) == 2;
#else
    static constexpr bool paired = false;
#endif
    static int64_t count(int64_t width) { return paired ? width / 2 : width; }
};

AOK_INLINE float element(const float* x, int64_t i) { return x[i]; }
AOK_INLINE float element(const uint16_t* x, int64_t i) { return widen(x[i]); }

// 16 rows of `width` elements as words; row(r) is the address of a row.
template <class T, class Row>
AOK_INLINE void load_rows(const Row& row, int64_t width, float* words) {
    for (int64_t r = 0; r < kLanes; ++r) {
        const T* from = row(r);
        for (int64_t j = 0; j < Words<T>::count(width); ++j) {
            if constexpr (Words<T>::paired) {
                std::memcpy(words + j * kLanes + r, from + 2 * j, sizeof(float));
            } else {
                words[j * kLanes + r] = element(from, j);
            }
        }
    }
}

// scores[s][row] = (q . key(s)) * scale of kKeys keys of `width` elements: pairs, the odd element first (rule 1). `key(s)`
// is the address of a key, q what load_rows left. A function of its own, or AVX2 runs out of registers.
template <class T, class Key>
__attribute__((noinline)) void score_keys(const float* q, const Key& key, int64_t width, Vec scale, float* scores) {
    const T* keys[kKeys];
    Vec acc[kKeys];
#pragma GCC unroll 16
    for (int s = 0; s < kKeys; ++s) {
        keys[s] = key(s);
        acc[s] = zero();
    }
    for (int64_t j = 0; j < width; j += 2) {
        if constexpr (Words<T>::paired) {
#if defined(AOK_ISA_avx512_bf16)
            const __m512bh words = reinterpret_cast<__m512bh>(load(q + j / 2 * kLanes));
#pragma GCC unroll 16
            for (int s = 0; s < kKeys; ++s) {
                int32_t pair;
                std::memcpy(&pair, keys[s] + j, sizeof(pair));
                acc[s] = _mm512_dpbf16_ps(acc[s], words, reinterpret_cast<__m512bh>(seti(pair)));
            }
#endif
        } else {
#pragma GCC unroll 2
            for (int odd = 1; odd >= 0; --odd) {
                const Vec word = load(q + (j + odd) * kLanes);
#pragma GCC unroll 16
                for (int s = 0; s < kKeys; ++s) {
                    acc[s] = fma(word, set1(element(keys[s], j + odd)), acc[s]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int s = 0; s < kKeys; ++s) store_raw(scores + s * kLanes, mul(acc[s], scale));
}

}  // namespace aok::AOK_NS
