// The virtual vector of simd.h in one zmm register.
#pragma once

#include <immintrin.h>

namespace aok::AOK_NS {

using Vec = __m512;
using VecI = __m512i;
using Mask = __mmask16;

AOK_INLINE Mask first_lanes(int64_t n) { return static_cast<Mask>((1u << n) - 1u); }

AOK_INLINE Vec zero() { return _mm512_setzero_ps(); }
AOK_INLINE Vec set1(float a) { return _mm512_set1_ps(a); }
AOK_INLINE VecI seti(int32_t a) { return _mm512_set1_epi32(a); }
AOK_INLINE VecI as_int(Vec a) { return _mm512_castps_si512(a); }
AOK_INLINE Vec as_float(VecI a) { return _mm512_castsi512_ps(a); }

AOK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
AOK_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
AOK_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
AOK_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
AOK_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
AOK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
AOK_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
AOK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

AOK_INLINE VecI addi(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
AOK_INLINE VecI subi(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
AOK_INLINE VecI andi(VecI a, VecI b) { return _mm512_and_si512(a, b); }
AOK_INLINE VecI ori(VecI a, VecI b) { return _mm512_or_si512(a, b); }
AOK_INLINE VecI xori(VecI a, VecI b) { return _mm512_xor_si512(a, b); }
template <int N>
AOK_INLINE VecI shl(VecI a) { return _mm512_slli_epi32(a, N); }
template <int N>
AOK_INLINE VecI shr(VecI a) { return _mm512_srli_epi32(a, N); }
template <int N>
AOK_INLINE VecI sar(VecI a) { return _mm512_srai_epi32(a, N); }
AOK_INLINE Vec to_float(VecI a) { return _mm512_cvtepi32_ps(a); }
AOK_INLINE VecI loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
AOK_INLINE void storei(int32_t* p, VecI a) { _mm512_storeu_si512(p, a); }

AOK_INLINE Mask lt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
AOK_INLINE Mask le(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
AOK_INLINE Mask eq(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
AOK_INLINE Mask unordered(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
AOK_INLINE Mask lti(VecI a, VecI b) { return _mm512_cmplt_epi32_mask(a, b); }
AOK_INLINE Mask eqi(VecI a, VecI b) { return _mm512_cmpeq_epi32_mask(a, b); }
AOK_INLINE Mask mask_and(Mask a, Mask b) { return static_cast<Mask>(a & b); }
AOK_INLINE Mask mask_or(Mask a, Mask b) { return static_cast<Mask>(a | b); }
AOK_INLINE bool any(Mask a) { return a != 0; }
AOK_INLINE uint32_t mask_bits(Mask a) { return a; }
AOK_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
AOK_INLINE VecI selecti(Mask m, VecI yes, VecI no) { return _mm512_mask_blend_epi32(m, no, yes); }

AOK_INLINE Vec neg(Vec a) { return as_float(xori(as_int(a), seti(INT32_MIN))); }
AOK_INLINE Vec abs(Vec a) { return as_float(andi(as_int(a), seti(INT32_MAX))); }
AOK_INLINE Vec canonical(Vec a) { return _mm512_mask_blend_ps(unordered(a), a, set1(bits_float(kCanonicalNaN))); }

AOK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
AOK_INLINE Vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
AOK_INLINE void store_raw(float* p, Vec a) { _mm512_storeu_ps(p, a); }
AOK_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, canonical(a)); }
AOK_INLINE void store(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), canonical(a)); }

AOK_INLINE Vec widen16(__m256i a) { return as_float(shl<16>(_mm512_cvtepu16_epi32(a))); }
AOK_INLINE Vec load_bf16(const uint16_t* p) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
AOK_INLINE Vec load_bf16(const uint16_t* p, int64_t n) { return widen16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

// The 16 bf16 values in the low halves of 32-bit lanes.
AOK_INLINE VecI narrow_lanes(Vec a) {
    const VecI bits = as_int(a);
    const VecI odd = andi(shr<16>(bits), seti(1));
    const VecI rounded = shr<16>(addi(addi(bits, seti(0x7fff)), odd));
    return _mm512_mask_mov_epi32(rounded, unordered(a), seti(kCanonicalNaN16));
}
#if defined(AOK_ISA_avx512_bf16)
// The instruction rounds to nearest even as well, and reads denormals as zero, of which arithmetic here leaves none.
AOK_INLINE __m256i narrow16(Vec a) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
    return _mm256_mask_mov_epi16(rounded, unordered(a), _mm256_set1_epi16(kCanonicalNaN16));
}
AOK_INLINE Vec round_bf16(Vec a) { return widen16(narrow16(a)); }
#else
AOK_INLINE __m256i narrow16(Vec a) { return _mm512_cvtepi32_epi16(narrow_lanes(a)); }
AOK_INLINE Vec round_bf16(Vec a) { return as_float(shl<16>(narrow_lanes(a))); }
#endif
AOK_INLINE void store_bf16(uint16_t* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(a)); }
AOK_INLINE void store_bf16(uint16_t* p, Vec a, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow16(a)); }

AOK_INLINE float fold(Vec a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace aok::AOK_NS
