// The virtual vector of simd.h as an array: the portable yardstick, and the form that a new architecture starts with.
#pragma once

namespace aok::AOK_NS {

struct Vec {
    float lane[kLanes];
};
struct VecI {
    int32_t lane[kLanes];
};
struct Mask {
    bool lane[kLanes];
};

#if defined(__FMA__) || defined(__aarch64__)
AOK_INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// One fp32 fused multiply-add without the instruction and without libm. The product of two floats is exact in binary64;
// the sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
// using rounding to odd", 2008), so that the one rounding to binary32 is right.
AOK_INLINE float fma1(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = static_cast<double>(c);
    double sum = product + addend;
    const double back = sum - product;
    const double error = (product - (sum - back)) + (addend - back);
    if (error < 0 || error > 0) {  // false for NaN: infinities and NaN are what they are
        uint64_t bits;
        std::memcpy(&bits, &sum, sizeof(bits));
        if ((bits & 1) == 0) {
            bits += ((error > 0) == (sum > 0)) ? 1 : -1;
            std::memcpy(&sum, &bits, sizeof(bits));
        }
    }
    return static_cast<float>(sum);
}
#endif

template <class R, class F>
AOK_INLINE R each_lane(F f) {
    R r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
    return r;
}

#define AOK_LANES(Type, expression) each_lane<Type>([&](int i) __attribute__((always_inline)) { return expression; })
AOK_INLINE int32_t wrap(uint32_t a) { return static_cast<int32_t>(a); }
AOK_INLINE uint32_t raw(int32_t a) { return static_cast<uint32_t>(a); }

AOK_INLINE Mask first_lanes(int64_t n) { return AOK_LANES(Mask, i < n); }

AOK_INLINE Vec set1(float a) { return AOK_LANES(Vec, (void(i), a)); }
AOK_INLINE Vec zero() { return set1(0.0f); }
AOK_INLINE VecI seti(int32_t a) { return AOK_LANES(VecI, (void(i), a)); }
AOK_INLINE VecI as_int(const Vec& a) { return AOK_LANES(VecI, wrap(float_bits(a.lane[i]))); }
AOK_INLINE Vec as_float(const VecI& a) { return AOK_LANES(Vec, bits_float(raw(a.lane[i]))); }

AOK_INLINE Vec add(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] + b.lane[i]); }
AOK_INLINE Vec sub(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] - b.lane[i]); }
AOK_INLINE Vec mul(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] * b.lane[i]); }
AOK_INLINE Vec div(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] / b.lane[i]); }
AOK_INLINE Vec sqrt(const Vec& a) { return AOK_LANES(Vec, __builtin_sqrtf(a.lane[i])); }
AOK_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return AOK_LANES(Vec, fma1(a.lane[i], b.lane[i], c.lane[i]));
}
AOK_INLINE Vec min(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
AOK_INLINE Vec max(const Vec& a, const Vec& b) { return AOK_LANES(Vec, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }

AOK_INLINE VecI addi(const VecI& a, const VecI& b) { return AOK_LANES(VecI, wrap(raw(a.lane[i]) + raw(b.lane[i]))); }
AOK_INLINE VecI subi(const VecI& a, const VecI& b) { return AOK_LANES(VecI, wrap(raw(a.lane[i]) - raw(b.lane[i]))); }
AOK_INLINE VecI andi(const VecI& a, const VecI& b) { return AOK_LANES(VecI, a.lane[i] & b.lane[i]); }
AOK_INLINE VecI ori(const VecI& a, const VecI& b) { return AOK_LANES(VecI, a.lane[i] | b.lane[i]); }
AOK_INLINE VecI xori(const VecI& a, const VecI& b) { return AOK_LANES(VecI, a.lane[i] ^ b.lane[i]); }
template <int N>
AOK_INLINE VecI shl(const VecI& a) { return AOK_LANES(VecI, wrap(raw(a.lane[i]) << N)); }
template <int N>
AOK_INLINE VecI shr(const VecI& a) { return AOK_LANES(VecI, wrap(raw(a.lane[i]) >> N)); }
template <int N>
AOK_INLINE VecI sar(const VecI& a) { return AOK_LANES(VecI, a.lane[i] >> N); }
AOK_INLINE Vec to_float(const VecI& a) { return AOK_LANES(Vec, static_cast<float>(a.lane[i])); }
AOK_INLINE VecI loadi(const int32_t* p) { return AOK_LANES(VecI, p[i]); }
AOK_INLINE void storei(int32_t* p, const VecI& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }

AOK_INLINE Mask lt(const Vec& a, const Vec& b) { return AOK_LANES(Mask, a.lane[i] < b.lane[i]); }
AOK_INLINE Mask le(const Vec& a, const Vec& b) { return AOK_LANES(Mask, a.lane[i] <= b.lane[i]); }
AOK_INLINE Mask eq(const Vec& a, const Vec& b) { return AOK_LANES(Mask, a.lane[i] == b.lane[i]); }
AOK_INLINE Mask unordered(const Vec& a) { return AOK_LANES(Mask, a.lane[i] != a.lane[i]); }
AOK_INLINE Mask lti(const VecI& a, const VecI& b) { return AOK_LANES(Mask, a.lane[i] < b.lane[i]); }
AOK_INLINE Mask eqi(const VecI& a, const VecI& b) { return AOK_LANES(Mask, a.lane[i] == b.lane[i]); }
AOK_INLINE Mask mask_and(const Mask& a, const Mask& b) { return AOK_LANES(Mask, a.lane[i] && b.lane[i]); }
AOK_INLINE Mask mask_or(const Mask& a, const Mask& b) { return AOK_LANES(Mask, a.lane[i] || b.lane[i]); }
AOK_INLINE uint32_t mask_bits(const Mask& a) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(a.lane[i]) << i;
    return bits;
}
AOK_INLINE bool any(const Mask& a) { return mask_bits(a) != 0; }
AOK_INLINE Vec select(const Mask& m, const Vec& yes, const Vec& no) {
    return AOK_LANES(Vec, m.lane[i] ? yes.lane[i] : no.lane[i]);
}
AOK_INLINE VecI selecti(const Mask& m, const VecI& yes, const VecI& no) {
    return AOK_LANES(VecI, m.lane[i] ? yes.lane[i] : no.lane[i]);
}

AOK_INLINE Vec neg(const Vec& a) { return as_float(xori(as_int(a), seti(INT32_MIN))); }
AOK_INLINE Vec abs(const Vec& a) { return as_float(andi(as_int(a), seti(INT32_MAX))); }
AOK_INLINE Vec canonical(const Vec& a) { return select(unordered(a), set1(bits_float(kCanonicalNaN)), a); }

AOK_INLINE Vec load(const float* p) { return AOK_LANES(Vec, p[i]); }
AOK_INLINE Vec load(const float* p, int64_t n) { return AOK_LANES(Vec, i < n ? p[i] : 0.0f); }
AOK_INLINE void store_raw(float* p, const Vec& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
AOK_INLINE void store(float* p, const Vec& a, int64_t n) {
    const Vec c = canonical(a);
    std::memcpy(p, c.lane, static_cast<size_t>(n) * sizeof(float));
}
AOK_INLINE void store(float* p, const Vec& a) { store(p, a, kLanes); }

AOK_INLINE Vec load_bf16(const uint16_t* p) { return AOK_LANES(Vec, widen(p[i])); }
AOK_INLINE Vec load_bf16(const uint16_t* p, int64_t n) { return AOK_LANES(Vec, i < n ? widen(p[i]) : 0.0f); }
AOK_INLINE Vec round_bf16(const Vec& a) { return AOK_LANES(Vec, widen(narrow(a.lane[i]))); }
AOK_INLINE void store_bf16(uint16_t* p, const Vec& a, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = narrow(a.lane[i]);
}
AOK_INLINE void store_bf16(uint16_t* p, const Vec& a) { store_bf16(p, a, kLanes); }

AOK_INLINE float fold(Vec a) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] + a.lane[i + width];
    }
    return a.lane[0];
}

}  // namespace aok::AOK_NS
