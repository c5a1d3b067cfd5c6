// A virtual vector of 16 fp32 lanes, the same on every instruction set.
//
// A kernel written with these names performs the same IEEE operations in the same order everywhere: one zmm register on
// AVX-512, two ymm on AVX2, an array elsewhere. Everything is inline in the namespace of the instruction set (AOK_NS):
// a function shared between them could be linked in a version that the CPU does not have.
//
//   Vec   16 fp32            VecI   16 int32           Mask   16 booleans
//   zero set1 load store     loadi storei seti as_int as_float      lt le eq unordered select any
//   add sub mul div sqrt     addi subi andi ori        mask_and mask_or mask_bits
//   fma min max neg abs      shl<N> shr<N> sar<N>      first_lanes(n)
//   load_bf16 store_bf16     to_int(exact) to_float
//   fold (i+8, i+4, i+2, i+1)
//
// min(a, b) is a < b ? a : b and max(a, b) is a > b ? a : b, so b is the result when either is NaN. Loads and stores with
// a count touch the first n lanes only (0 <= n <= 16); the others load as +0. Stores write the canonical quiet NaN for
// any NaN (store_raw: what there is). bf16 stores round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#define AOK_MEMBER inline __attribute__((always_inline))
#define AOK_INLINE static AOK_MEMBER

namespace aok::AOK_NS {

constexpr int kLanes = 16;
constexpr uint32_t kCanonicalNaN = 0x7fc00000u;
constexpr uint16_t kCanonicalNaN16 = 0x7fc0u;

AOK_INLINE float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

AOK_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// bf16 to fp32 is a shift; fp32 to bf16 rounds to nearest even, NaN to the canonical one.
AOK_INLINE float widen(uint16_t value) { return bits_float(static_cast<uint32_t>(value) << 16); }

AOK_INLINE uint16_t narrow(float value) {
    const uint32_t bits = float_bits(value);
    if (value != value) return kCanonicalNaN16;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace aok::AOK_NS

#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
#include "simd_avx512.h"
#elif defined(AOK_ISA_avx2)
#include "simd_avx2.h"
#else
#include "simd_array.h"
#endif

namespace aok::AOK_NS {

AOK_INLINE Vec load_as_float(const float* p) { return load(p); }
AOK_INLINE Vec load_as_float(const uint16_t* p) { return load_bf16(p); }
AOK_INLINE Vec load_as_float(const float* p, int64_t n) { return load(p, n); }
AOK_INLINE Vec load_as_float(const uint16_t* p, int64_t n) { return load_bf16(p, n); }
AOK_INLINE void store_rounded(float* p, Vec v) { store(p, v); }
AOK_INLINE void store_rounded(uint16_t* p, Vec v) { store_bf16(p, v); }
AOK_INLINE void store_rounded(float* p, Vec v, int64_t n) { store(p, v, n); }
AOK_INLINE void store_rounded(uint16_t* p, Vec v, int64_t n) { store_bf16(p, v, n); }

// What a value becomes when it is stored as T and read again.
template <class T>
AOK_INLINE Vec round_to(Vec v);
template <>
AOK_MEMBER Vec round_to<float>(Vec v) { return v; }
template <>
AOK_MEMBER Vec round_to<uint16_t>(Vec v) { return round_bf16(v); }

}  // namespace aok::AOK_NS
