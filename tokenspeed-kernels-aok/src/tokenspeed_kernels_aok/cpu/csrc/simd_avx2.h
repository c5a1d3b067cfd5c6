// The virtual vector of simd.h in two ymm registers.
#pragma once

#include <immintrin.h>

namespace aok::AOK_NS {

struct Vec {
    __m256 lo, hi;
};
struct VecI {
    __m256i lo, hi;
};
struct Mask {
    __m256 lo, hi;  // all ones or all zeros in each lane
};

AOK_INLINE __m256i first_lanes8(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}
AOK_INLINE Mask first_lanes(int64_t n) {
    return {_mm256_castsi256_ps(first_lanes8(n)), _mm256_castsi256_ps(first_lanes8(n - 8))};
}

AOK_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AOK_INLINE Vec set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
AOK_INLINE VecI seti(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
AOK_INLINE VecI as_int(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
AOK_INLINE Vec as_float(VecI a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }

#define AOK_BINARY(name, Type, op) \
    AOK_INLINE Type name(Type a, Type b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
AOK_BINARY(add, Vec, _mm256_add_ps)
AOK_BINARY(sub, Vec, _mm256_sub_ps)
AOK_BINARY(mul, Vec, _mm256_mul_ps)
AOK_BINARY(div, Vec, _mm256_div_ps)
AOK_BINARY(min, Vec, _mm256_min_ps)
AOK_BINARY(max, Vec, _mm256_max_ps)
AOK_BINARY(addi, VecI, _mm256_add_epi32)
AOK_BINARY(subi, VecI, _mm256_sub_epi32)
AOK_BINARY(andi, VecI, _mm256_and_si256)
AOK_BINARY(ori, VecI, _mm256_or_si256)
AOK_BINARY(xori, VecI, _mm256_xor_si256)
AOK_BINARY(mask_and, Mask, _mm256_and_ps)
AOK_BINARY(mask_or, Mask, _mm256_or_ps)
#undef AOK_BINARY

AOK_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
AOK_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
template <int N>
AOK_INLINE VecI shl(VecI a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N>
AOK_INLINE VecI shr(VecI a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
template <int N>
AOK_INLINE VecI sar(VecI a) { return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)}; }
AOK_INLINE Vec to_float(VecI a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
AOK_INLINE VecI loadi(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
AOK_INLINE void storei(int32_t* p, VecI a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}

AOK_INLINE Mask lt(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
AOK_INLINE Mask le(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
AOK_INLINE Mask eq(Vec a, Vec b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
AOK_INLINE Mask unordered(Vec a) {
    return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
AOK_INLINE Mask lti(VecI a, VecI b) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
AOK_INLINE Mask eqi(VecI a, VecI b) {
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
AOK_INLINE uint32_t mask_bits(Mask a) {
    return static_cast<uint32_t>(_mm256_movemask_ps(a.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(a.hi)) << 8;
}
AOK_INLINE bool any(Mask a) { return mask_bits(a) != 0; }
AOK_INLINE Vec select(Mask m, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
AOK_INLINE VecI selecti(Mask m, VecI yes, VecI no) { return as_int(select(m, as_float(yes), as_float(no))); }

AOK_INLINE Vec neg(Vec a) { return as_float(xori(as_int(a), seti(INT32_MIN))); }
AOK_INLINE Vec abs(Vec a) { return as_float(andi(as_int(a), seti(INT32_MAX))); }
AOK_INLINE Vec canonical(Vec a) { return select(unordered(a), set1(bits_float(kCanonicalNaN)), a); }

AOK_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AOK_INLINE Vec load(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first_lanes8(n)), _mm256_maskload_ps(p + 8, first_lanes8(n - 8))};
}
AOK_INLINE void store_raw(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
AOK_INLINE void store(float* p, Vec a) { store_raw(p, canonical(a)); }
AOK_INLINE void store(float* p, Vec a, int64_t n) {
    const Vec c = canonical(a);
    _mm256_maskstore_ps(p, first_lanes8(n), c.lo);
    _mm256_maskstore_ps(p + 8, first_lanes8(n - 8), c.hi);
}

AOK_INLINE Vec load_bf16(const uint16_t* p) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const VecI wide = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                       _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
    return as_float(shl<16>(wide));
}
AOK_INLINE Vec load_bf16(const uint16_t* p, int64_t n) {
    alignas(32) uint16_t lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
    return load_bf16(lanes);
}

// The 16 bf16 values in the low halves of 32-bit lanes.
AOK_INLINE VecI narrow_lanes(Vec a) {
    const VecI bits = as_int(a);
    const VecI odd = andi(shr<16>(bits), seti(1));
    const VecI rounded = shr<16>(addi(addi(bits, seti(0x7fff)), odd));
    return selecti(unordered(a), seti(kCanonicalNaN16), rounded);
}
AOK_INLINE __m256i narrow16(Vec a) {
    const VecI lanes = narrow_lanes(a);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lanes.lo, lanes.hi), 0xd8);
}
AOK_INLINE Vec round_bf16(Vec a) { return as_float(shl<16>(narrow_lanes(a))); }
AOK_INLINE void store_bf16(uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(a)); }
AOK_INLINE void store_bf16(uint16_t* p, Vec a, int64_t n) {
    alignas(32) uint16_t lanes[kLanes];
    store_bf16(lanes, a);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
}

AOK_INLINE float fold(Vec a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace aok::AOK_NS
