"""exp, log and the noise of the sampling stream, out of IEEE operations: the bits of the CPU kernels on every GPU.

Polynomials, constants and order are those of docs/design/bits.md; every fused multiply-add is written as one. Denormal
operands are not flushed here as they are on the CPU; no argument that the kernels use can show it (exp of a denormal is
1 either way, and log is taken of sums of at least 1, of min_p and of uniforms in [2^-24, 1)).

Device functions only. The noise of a token is a pure function of (seed, position, token id).
"""

from __future__ import annotations

import triton
import triton.language as tl

_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, to nearest even
_LOG2E = tl.constexpr(float.fromhex("0x1.715476p0"))
_LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e4p-1"))
_LN2_LOW = tl.constexpr(float.fromhex("0x1.7f7d1cp-20"))
_EXP = tl.constexpr(
    tuple(
        float.fromhex(text)
        for text in ("0x1.6a52e4p-10", "0x1.123972p-7", "0x1.5558aap-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1")
    )
)
_LOG = tl.constexpr(
    tuple(
        float.fromhex(text)
        for text in (
            "-0x1.38c9dep-4",
            "0x1.055ec6p-3",
            "-0x1.0d8242p-3",
            "0x1.22d92ep-3",
            "-0x1.54728ap-3",
            "0x1.99a01cp-3",
            "-0x1.000226p-2",
            "0x1.555554p-2",
        )
    )
)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.constexpr_function
def _at(values: tuple[float, ...], index: int) -> float:
    return values[index]


@triton.constexpr_function
def _weyl(step: int, round_index: int) -> int:
    return step * round_index & 0xFFFFFFFF


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """Horner's rule in fused multiply-adds, highest power first."""
    value = tl.full(x.shape, _at(COEFFICIENTS, 0), tl.float32)
    for i in tl.static_range(1, COUNT):
        value = tl.math.fma(value, x, tl.full(x.shape, _at(COEFFICIENTS, i), tl.float32))
    return value


@triton.jit
def exp(x):
    """e^x: +0 where the result is below 2^-126, +infinity on overflow, NaN for NaN."""
    clamped = tl.minimum(tl.maximum(x, -88.0), 89.0)
    shifted = tl.math.fma(clamped, tl.full(x.shape, _LOG2E, tl.float32), tl.full(x.shape, _SHIFT, tl.float32))
    n = shifted - _SHIFT
    r = tl.math.fma(n, tl.full(x.shape, -_LN2_HIGH, tl.float32), clamped)
    r = tl.math.fma(n, tl.full(x.shape, -_LN2_LOW, tl.float32), r)
    p = _polynomial(r, _EXP, 7)
    # 2^128 is no float: above 0, one power of two is applied afterwards. The low bits of the shifted value hold n.
    large = n > 0.0
    power = (tl.where(large, shifted - 1.0, shifted).to(tl.int32, bitcast=True) << 23) + 0x3F800000
    y = p * power.to(tl.float32, bitcast=True) * tl.where(large, 2.0, 1.0)
    y = tl.where(y < 1.1754943508222875e-38, 0.0, y)
    return tl.where(x != x, x, y)


@triton.jit
def log_positive(x):
    """Natural logarithm of a positive normal number."""
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # x = m 2^e with m in [sqrt(1/2), sqrt(2))
    e = (shifted >> 23).to(tl.float32)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = _polynomial(f, _LOG, 8)
    inner = tl.math.fma(f, p, tl.full(x.shape, -0.5, tl.float32))
    tail = tl.math.fma(e, tl.full(x.shape, _LN2_LOW, tl.float32), f * f * inner)
    return tl.math.fma(e, tl.full(x.shape, _LN2_HIGH, tl.float32), f + tail)


@triton.jit
def log(x):
    """Natural logarithm: -infinity at 0, NaN below, NaN for NaN, +infinity for itself."""
    y = tl.where(x == float("inf"), x, log_positive(x))
    y = tl.where(x == 0.0, float("-inf"), y)
    return tl.where((x < 0.0) | (x != x), float("nan"), y)


@triton.jit
def philox(c0, c2, c3, k0, k1):
    """Philox4x32-10 of the counter (c0, 0, c2, c3) and the key (k0, k1), all uint32 of one shape: four words.

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
    """
    c1 = tl.zeros_like(c0)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for i in tl.static_range(10):
        high0 = tl.math.umulhi(m0, c0)
        high1 = tl.math.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ (k0 + tl.full(c0.shape, _weyl(_WEYL_0, i), tl.uint32))
        c2 = high0 ^ c3 ^ (k1 + tl.full(c0.shape, _weyl(_WEYL_1, i), tl.uint32))
        c1 = low1
        c3 = low0
    return c0, c1, c2, c3


@triton.jit
def gumbel(first, seed, position, BLOCK: tl.constexpr):
    """-log(-log(u)) of the tokens first .. first + BLOCK - 1 (first a multiple of 4), for int64 scalars seed, position.

    Counter: (token id >> 2, 0, low and high word of the position); key: low and high word of the seed; output word:
    token id & 3; u = ((word >> 9) + 1/2) * 2^-23, exact.
    """
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(quad)
    w0, w1, w2, w3 = philox(
        quad,
        zero + position.to(tl.uint32),
        zero + (position >> 32).to(tl.uint32),
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    u = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -log_positive(-log_positive(u))
