// Philox4x32-10 for 16 counters at once, and the Gumbel noise of the sampling stream.
//
// Generator and constants: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
#pragma once

#include "math.h"
#include "simd.h"

namespace aok::AOK_NS {

// High and low 32 bits of a lane's 64-bit product with a constant.
struct Product {
    VecI high, low;
};

#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
AOK_INLINE Product wide_mul(VecI a, uint32_t constant) {
    const __m512i c = _mm512_set1_epi32(static_cast<int32_t>(constant));
    const __m512i even = _mm512_mul_epu32(a, c), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), c);
    return {_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB), _mm512_mullo_epi32(a, c)};
}
AOK_INLINE VecI xor3(VecI a, VecI b, VecI c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

// Transposes each 4x4 tile of 128-bit lanes: result e holds element e of a, b, c, d in every 128-bit lane.
AOK_INLINE void transpose4(VecI (&w)[4]) {
    const __m512i ab0 = _mm512_unpacklo_epi32(w[0], w[1]), ab1 = _mm512_unpackhi_epi32(w[0], w[1]);
    const __m512i cd0 = _mm512_unpacklo_epi32(w[2], w[3]), cd1 = _mm512_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm512_unpacklo_epi64(ab0, cd0);
    w[1] = _mm512_unpackhi_epi64(ab0, cd0);
    w[2] = _mm512_unpacklo_epi64(ab1, cd1);
    w[3] = _mm512_unpackhi_epi64(ab1, cd1);
}
#elif defined(AOK_ISA_avx2)
AOK_INLINE VecI xor3(VecI a, VecI b, VecI c) { return xori(xori(a, b), c); }

AOK_INLINE void wide_mul8(__m256i a, __m256i c, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(a, c), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), c);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
AOK_INLINE Product wide_mul(VecI a, uint32_t constant) {
    const __m256i c = _mm256_set1_epi32(static_cast<int32_t>(constant));
    Product p;
    wide_mul8(a.lo, c, p.high.lo, p.low.lo);
    wide_mul8(a.hi, c, p.high.hi, p.low.hi);
    return p;
}

AOK_INLINE void transpose4x8(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    a = _mm256_unpacklo_epi64(ab0, cd0);
    b = _mm256_unpackhi_epi64(ab0, cd0);
    c = _mm256_unpacklo_epi64(ab1, cd1);
    d = _mm256_unpackhi_epi64(ab1, cd1);
}
AOK_INLINE void transpose4(VecI (&w)[4]) {
    transpose4x8(w[0].lo, w[1].lo, w[2].lo, w[3].lo);
    transpose4x8(w[0].hi, w[1].hi, w[2].hi, w[3].hi);
}
#else
AOK_INLINE VecI xor3(const VecI& a, const VecI& b, const VecI& c) { return xori(xori(a, b), c); }

AOK_INLINE Product wide_mul(const VecI& a, uint32_t constant) {
    Product p;
    for (int i = 0; i < kLanes; ++i) {
        const uint64_t wide = static_cast<uint64_t>(raw(a.lane[i])) * constant;
        p.high.lane[i] = wrap(static_cast<uint32_t>(wide >> 32));
        p.low.lane[i] = wrap(static_cast<uint32_t>(wide));
    }
    return p;
}

AOK_INLINE void transpose4(VecI (&w)[4]) {
    VecI out[4];
    for (int e = 0; e < 4; ++e) {
        for (int i = 0; i < kLanes; ++i) out[e].lane[i] = w[i % 4].lane[i / 4 * 4 + e];
    }
    for (int e = 0; e < 4; ++e) w[e] = out[e];
}
#endif

constexpr int64_t kNoiseTokens = 64;  // 16 counters of four words
constexpr int kPhiloxRounds = 10;

// The stream of one row at one position: key from the seed, half of the counter from the position.
class NoiseStream {
public:
    NoiseStream(int64_t seed, int64_t position)
        : counter2_(static_cast<int32_t>(position)), counter3_(static_cast<int32_t>(position >> 32)) {
        uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
        for (int round = 0; round < kPhiloxRounds; ++round) {
            keys_[round][0] = static_cast<int32_t>(key0);
            keys_[round][1] = static_cast<int32_t>(key1);
            key0 += 0x9e3779b9u;
            key1 += 0xbb67ae85u;
        }
    }

    // Random bits of the tokens first .. first + 63 (first a multiple of 64), 16 to a vector.
    AOK_MEMBER void words(int64_t first, VecI (&c)[4]) const {
        // Lane 4i + e counts quad 4e + i, so that transposing 128-bit lanes brings neighbours together.
        alignas(64) static constexpr int32_t kQuads[kLanes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        c[0] = addi(loadi(kQuads), seti(static_cast<int32_t>(first / 4)));
        c[1] = seti(0);
        c[2] = seti(counter2_);
        c[3] = seti(counter3_);
#pragma GCC unroll 10
        for (int round = 0; round < kPhiloxRounds; ++round) {
            const Product p0 = wide_mul(c[0], 0xd2511f53u), p1 = wide_mul(c[2], 0xcd9e8d57u);
            c[0] = xor3(p1.high, c[1], seti(keys_[round][0]));
            c[2] = xor3(p0.high, c[3], seti(keys_[round][1]));
            c[1] = p1.low;
            c[3] = p0.low;
        }
        transpose4(c);
    }

private:
    int32_t keys_[kPhiloxRounds][2];
    const int32_t counter2_, counter3_;
};

// ((word >> 9) + 1/2) * 2^-23: in (0, 1), and exact.
AOK_INLINE Vec uniform(VecI words) { return mul(add(to_float(shr<9>(words)), set1(0.5f)), set1(0x1p-23f)); }

AOK_INLINE Vec gumbel(Vec u) { return neg(log_positive(neg(log_positive(u)))); }

// No noise is above: the largest u is 1 - 2^-24, and -log(-log(u)) is 16.6355 there.
constexpr float kMostNoise = 16.64f;

}  // namespace aok::AOK_NS
