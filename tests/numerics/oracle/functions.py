"""exp2, exp and log of the published bit orders, one IEEE operation at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from oracle import ieee
from oracle.ieee import F32


def _floats(*hexadecimal: str) -> list[np.float32]:
    return [np.float32(float.fromhex(text)) for text in hexadecimal]


EXP2 = _floats(
    "0x1p0", "0x1.62e430p-1", "0x1.ebfbdcp-3", "0x1.c6af7ap-5", "0x1.3b2dd0p-7", "0x1.5f094ap-10", "0x1.417ce2p-13"
)  # fmt: skip
"""Coefficients of 2^f on [-1/2, 1/2], lowest power first."""

EXP = _floats(
    "0x1p0", "0x1p0", "0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558aap-5", "0x1.123972p-7", "0x1.6a52e4p-10"
)  # fmt: skip
"""Coefficients of e^r on [-ln(2)/2, ln(2)/2]."""

LOG = _floats(
    "0x1.555554p-2",
    "-0x1.000226p-2",
    "0x1.99a01cp-3",
    "-0x1.54728ap-3",
    "0x1.22d92ep-3",
    "-0x1.0d8242p-3",
    "0x1.055ec6p-3",
    "-0x1.38c9dep-4",
)
"""Coefficients p of log(1 + f) = f + f^2 (f p(f) - 1/2) on [sqrt(1/2) - 1, sqrt(2) - 1]."""

LOG2E, LN2_HIGH, LN2_LOW = _floats("0x1.715476p0", "0x1.62e4p-1", "0x1.7f7d1cp-20")
_SHIFT = np.float32(1.5 * 2**23)


def _polynomial(coefficients: list[np.float32], x: F32) -> F32:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = ieee.fma(value, x, coefficient)
    return value


def _times_power(p: F32, n: F32) -> F32:
    """p * 2^n for whole n in [-127, 128]: a power below 2^-126 is +0; 2^128 is taken as 2^127 and then 2."""
    exponent = np.nan_to_num(n, nan=0.0).astype(np.int32)
    large = exponent > 0
    power = ((np.where(large, exponent - 1, exponent) + 127) << 23).view(np.float32)
    scaled = ieee.mul(p, power)
    return np.where(large, ieee.mul(scaled, np.float32(2)), scaled)


def exp2(x: ArrayLike) -> F32:
    """2^x: +0 below -126, +infinity from 128; NaN for NaN."""
    x = ieee.daz(x)
    clamped = np.clip(x, np.float32(-127), np.float32(128))
    n = ieee.sub(ieee.add(clamped, _SHIFT), _SHIFT)
    y = _times_power(_polynomial(EXP2, ieee.sub(clamped, n)), n)
    return np.where(x >= 128, np.float32(np.inf), y)


def exp(x: ArrayLike) -> F32:
    """e^x: +0 below about -87.34, +infinity on overflow; NaN for NaN."""
    clamped = np.clip(ieee.daz(x), np.float32(-88), np.float32(89))
    n = ieee.sub(ieee.fma(clamped, LOG2E, _SHIFT), _SHIFT)
    r = ieee.fma(n, -LN2_HIGH, clamped)
    r = ieee.fma(n, -LN2_LOW, r)
    return _times_power(_polynomial(EXP, r), n)


def log(x: ArrayLike) -> F32:
    """Natural logarithm: -infinity at zero, NaN below, +infinity at itself; NaN for NaN."""
    x = ieee.daz(x)
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23  # x = m 2^e with m in [sqrt(1/2), sqrt(2))
    mantissa = (bits - (exponent << 23)).view(np.float32)
    f = ieee.sub(mantissa, 1)
    e = exponent.astype(np.float32)
    inner = ieee.fma(f, _polynomial(LOG, f), np.float32(-0.5))
    tail = ieee.fma(e, LN2_LOW, ieee.mul(ieee.mul(f, f), inner))
    result = ieee.fma(e, LN2_HIGH, ieee.add(f, tail))
    result = np.where(x == np.inf, np.float32(np.inf), result)
    result = np.where(x == 0, np.float32(-np.inf), result)
    return ieee.canonical(np.where((x < 0) | np.isnan(x), np.float32(np.nan), result))
