// exp2, exp and log out of IEEE operations only: the same bits on every instruction set (docs/design/bits.md, rule 5).
//
// The coefficients are minimax fits with the leading ones fixed, rounded to binary32 one by one. NaN gives NaN.
#pragma once

#include "simd.h"

namespace aok::AOK_NS {

constexpr float kRoundShift = 0x1.8p23f;  // adding and subtracting it rounds to an integer, to nearest even
constexpr float kInfinity = __builtin_inff();

// 2^f for f in [-0.5, 0.5]; relative error of the polynomial 0.05 * 2^-24.
AOK_INLINE Vec exp2_polynomial(Vec f) {
    Vec p = set1(0x1.417ce2p-13f);
    p = fma(p, f, set1(0x1.5f094ap-10f));
    p = fma(p, f, set1(0x1.3b2dd0p-7f));
    p = fma(p, f, set1(0x1.c6af7ap-5f));
    p = fma(p, f, set1(0x1.ebfbdcp-3f));
    p = fma(p, f, set1(0x1.62e430p-1f));
    return fma(p, f, set1(1.0f));
}

// e^r for r in [-ln2/2, ln2/2]; relative error of the polynomial 0.05 * 2^-24.
AOK_INLINE Vec exp_polynomial(Vec r) {
    Vec p = set1(0x1.6a52e4p-10f);
    p = fma(p, r, set1(0x1.123972p-7f));
    p = fma(p, r, set1(0x1.5558aap-5f));
    p = fma(p, r, set1(0x1.555492p-3f));
    p = fma(p, r, set1(0x1.fffffcp-2f));
    p = fma(p, r, set1(1.0f));
    return fma(p, r, set1(1.0f));
}

// p * 2^n, where the low bits of `shifted` (= n + kRoundShift) hold n in [-127, 127]. n = -127 gives +0.
AOK_INLINE Vec scale_by_power(Vec p, Vec shifted) {
    return mul(p, as_float(addi(shl<23>(as_int(shifted)), seti(0x3f800000))));
}

// 2^x for x <= 0 (or NaN): exactly +0 below -126. The cheap form for attention and sums of exponentials.
AOK_INLINE Vec exp2_nonpositive(Vec x) {
    const Vec clamped = max(set1(-127.0f), x);
    const Vec shifted = add(clamped, set1(kRoundShift));
    const Vec f = sub(clamped, sub(shifted, set1(kRoundShift)));
    return scale_by_power(exp2_polynomial(f), shifted);
}

// 2^x: +0 below -126, +infinity from 128.
AOK_INLINE Vec exp2(Vec x) {
    // Above 0 half of the exponent is applied at a time: 2^128 is no binary32 number, but 2^127.9 is.
    const Vec clamped = min(set1(128.0f), max(set1(-127.0f), x));
    const Vec shifted = add(clamped, set1(kRoundShift));
    const Vec n = sub(shifted, set1(kRoundShift));
    const Vec p = exp2_polynomial(sub(clamped, n));
    const Mask large = lt(set1(0.0f), n);
    const Vec once = select(large, sub(shifted, set1(1.0f)), shifted);
    return mul(scale_by_power(p, once), select(large, set1(2.0f), set1(1.0f)));
}

// e^x: x = n ln2 + r with ln2 in two parts; +0 where n < -126 or the result is below 2^-126, +infinity on overflow.
AOK_INLINE Vec exp(Vec x) {
    const Vec clamped = min(set1(89.0f), max(set1(-88.0f), x));
    const Vec shifted = fma(clamped, set1(0x1.715476p0f), set1(kRoundShift));
    const Vec n = sub(shifted, set1(kRoundShift));
    const Vec r = fma(n, set1(-0x1.7f7d1cp-20f), fma(n, set1(-0x1.62e4p-1f), clamped));
    const Vec p = exp_polynomial(r);
    const Mask large = lt(set1(0.0f), n);
    const Vec once = select(large, sub(shifted, set1(1.0f)), shifted);
    return mul(scale_by_power(p, once), select(large, set1(2.0f), set1(1.0f)));
}

// e^x for x <= 0 (or NaN): the bits of exp(x), without what only larger arguments need.
AOK_INLINE Vec exp_nonpositive(Vec x) {
    const Vec clamped = max(set1(-88.0f), x);
    const Vec shifted = fma(clamped, set1(0x1.715476p0f), set1(kRoundShift));
    const Vec n = sub(shifted, set1(kRoundShift));
    const Vec r = fma(n, set1(-0x1.7f7d1cp-20f), fma(n, set1(-0x1.62e4p-1f), clamped));
    return scale_by_power(exp_polynomial(r), shifted);
}

// Natural logarithm of a positive normal number.
AOK_INLINE Vec log_positive(Vec x) {
    // x = m 2^e with m in [sqrt(1/2), sqrt(2)); 0x3f3504f3 is sqrt(1/2).
    const VecI shifted = subi(as_int(x), seti(0x3f3504f3));
    const Vec e = to_float(sar<23>(shifted));
    const Vec f = sub(as_float(addi(andi(shifted, seti(0x007fffff)), seti(0x3f3504f3))), set1(1.0f));
    Vec p = set1(-0x1.38c9dep-4f);
    p = fma(p, f, set1(0x1.055ec6p-3f));
    p = fma(p, f, set1(-0x1.0d8242p-3f));
    p = fma(p, f, set1(0x1.22d92ep-3f));
    p = fma(p, f, set1(-0x1.54728ap-3f));
    p = fma(p, f, set1(0x1.99a01cp-3f));
    p = fma(p, f, set1(-0x1.000226p-2f));
    p = fma(p, f, set1(0x1.555554p-2f));
    // log(1 + f) = f + (f^2 (f p - 1/2)), small terms first.
    const Vec square = mul(f, f);
    const Vec tail = fma(e, set1(0x1.7f7d1cp-20f), mul(square, fma(f, p, set1(-0.5f))));
    return fma(e, set1(0x1.62e4p-1f), add(f, tail));
}

// Natural logarithm: -infinity for +-0 (and denormals, which read as zero), NaN below zero, +infinity for itself.
AOK_INLINE Vec log(Vec x) {
    Vec y = log_positive(x);
    y = select(eq(x, set1(kInfinity)), x, y);
    y = select(lt(x, zero()), set1(bits_float(kCanonicalNaN)), y);
    y = select(eq(x, zero()), set1(-kInfinity), y);
    return select(unordered(x), x, y);
}

}  // namespace aok::AOK_NS
