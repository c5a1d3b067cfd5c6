"""IEEE binary32 arithmetic with denormals flushed, one correctly rounded operation at a time, for NumPy arrays.

Every function takes and returns float32 arrays (scalars broadcast), reads denormal inputs as zero, rounds once to
nearest even and flushes denormal results to zero, as a kernel does under MXCSR's FTZ and DAZ. Whether a result is
denormal is decided after rounding to 24 bits with an unbounded exponent, as x86 does.

The method: every operation is done in binary64, where products of floats are exact and where rounding twice (53 bits,
then 24) is harmless for +, -, *, / and sqrt because 53 >= 2 * 24 + 2. The fused multiply-add needs more: the exact sum
of the exact product and the addend is rounded to *odd* in binary64 (by the error term of an exact two-sum), and
rounding that to 24 bits is then correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]

_MIN_NORMAL = 2.0**-126
_QUIET = {"over": "ignore", "under": "ignore", "invalid": "ignore", "divide": "ignore"}

NAN_BITS = 0x7FC00000
"""The one NaN that kernels write."""


def daz(x: ArrayLike) -> F32:
    """`x` with denormals replaced by zeros of the same sign."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.abs(x) < np.float32(_MIN_NORMAL), np.copysign(np.float32(0), x), x)


def _round(exact: F64) -> F32:
    """binary64 (exact, or rounded to odd) to binary32, flushing what is below 2^-126 after rounding to 24 bits."""
    with np.errstate(**_QUIET):
        rounded = exact.astype(np.float32)
        scaled = (exact * 2.0**64).astype(np.float32)
        tiny = np.where(np.abs(scaled) < np.float32(2.0**-62), np.float32(0), np.float32(_MIN_NORMAL))
    return np.where(np.abs(exact) < _MIN_NORMAL, np.copysign(tiny, exact).astype(np.float32), rounded)


def _wide(x: ArrayLike) -> F64:
    return daz(x).astype(np.float64)


def add(a: ArrayLike, b: ArrayLike) -> F32:
    """a + b."""
    with np.errstate(**_QUIET):
        return _round(_wide(a) + _wide(b))


def sub(a: ArrayLike, b: ArrayLike) -> F32:
    """a - b."""
    with np.errstate(**_QUIET):
        return _round(_wide(a) - _wide(b))


def mul(a: ArrayLike, b: ArrayLike) -> F32:
    """a * b."""
    with np.errstate(**_QUIET):
        return _round(_wide(a) * _wide(b))


def div(a: ArrayLike, b: ArrayLike) -> F32:
    """a / b."""
    with np.errstate(**_QUIET):
        return _round(_wide(a) / _wide(b))


def sqrt(a: ArrayLike) -> F32:
    """Square root."""
    with np.errstate(**_QUIET):
        return _round(np.sqrt(_wide(a)))


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> F32:
    """a * b + c with one rounding."""
    with np.errstate(**_QUIET):
        product, addend = np.broadcast_arrays(_wide(a) * _wide(b), _wide(c))
        total = np.asarray(product + addend)
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0) & even
        to_odd = np.where((error > 0) == (total > 0), 1, -1)  # magnitude grows when the error has the total's sign
        odd = np.where(inexact, (total.view(np.int64) + to_odd).view(np.float64), total)
    return _round(odd)


def widen(bits: U16) -> F32:
    """bf16 (as its 16 bits) to float32."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: ArrayLike) -> U16:
    """float32 to the 16 bits of bf16: one rounding to nearest even, denormals flushed, NaN as 0x7FC0."""
    x = daz(x)
    bits = x.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(NAN_BITS >> 16), rounded)


def canonical(x: ArrayLike) -> F32:
    """`x` with every NaN replaced by the one that kernels write."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.isnan(x), np.array(NAN_BITS, dtype=np.uint32).view(np.float32), x)


def fold_halves(lanes: F32) -> F32:
    """Sum over the last axis (a power of two) by the halving tree: lane i + lane i + n/2, until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = add(lanes[..., :half], lanes[..., half:])
    return lanes[..., 0]
