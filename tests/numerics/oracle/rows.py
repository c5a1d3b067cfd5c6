"""Norms, rotary embedding and SiLU, one IEEE operation at a time.

Inputs and results are fp32 arrays; `narrow` rounds to the dtype of the model (the identity for fp32).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oracle import functions, ieee
from oracle.ieee import F32

LANES = 64

Narrow = Callable[[F32], F32]


def exact(x: F32) -> F32:
    """The narrowing of an fp32 model: none."""
    return x


def bf16(x: F32) -> F32:
    """To bf16 and back."""
    return ieee.widen(ieee.to_bf16(x))


def inverse_rms(x: F32, eps: float) -> F32:
    """1 / sqrt(mean(x^2) + eps) of the rows of x [R,H]: [R,1]."""
    rows, h = x.shape
    lanes = np.zeros((rows, LANES), np.float32)
    for start in range(0, h, LANES):
        part = x[:, start : start + LANES]
        lanes[:, : part.shape[1]] = ieee.fma(part, part, lanes[:, : part.shape[1]])
    mean = ieee.div(ieee.fold_halves(lanes), np.float32(h))
    return ieee.div(np.float32(1), ieee.sqrt(ieee.add(mean, np.float32(eps))))[:, None]


def rms_norm(x: F32, weight: F32, eps: float, narrow: Narrow) -> F32:
    """x / rms(x), narrowed, times weight, narrowed; x [R,H]."""
    return ieee.canonical(narrow(ieee.mul(narrow(ieee.mul(x, inverse_rms(x, eps))), weight)))


def add_rms_norm(x: F32, residual: F32, weight: F32, eps: float, narrow: Narrow) -> tuple[F32, F32]:
    """The norm of the unrounded sum, and the sum narrowed."""
    total = ieee.add(x, residual)
    return rms_norm(total, weight, eps, narrow), ieee.canonical(narrow(total))


def layer_norm(x: F32, weight: F32, bias: F32, eps: float, narrow: Narrow) -> F32:
    """(x - mean) / deviation, times weight, plus bias; narrowed once; x [R,H]."""
    rows, h = x.shape
    lanes = np.zeros((rows, LANES), np.float32)
    for start in range(0, h, LANES):
        part = x[:, start : start + LANES]
        lanes[:, : part.shape[1]] = ieee.add(lanes[:, : part.shape[1]], part)
    centred = ieee.sub(x, ieee.div(ieee.fold_halves(lanes), np.float32(h))[:, None])
    return ieee.canonical(narrow(ieee.fma(ieee.mul(centred, inverse_rms(centred, eps)), weight, bias)))


def rope(x: F32, cosine: F32, sine: F32, interleaved: bool, narrow: Narrow) -> F32:
    """Rotate the first 2R features of x [T,heads,D] by cosine and sine [T,R]; the others pass unchanged."""
    half = cosine.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first], x[..., second]
    c, s = cosine[:, None, :], sine[:, None, :]
    out = x.copy()
    out[..., first] = ieee.canonical(narrow(ieee.fma(a, c, -ieee.mul(b, s))))
    out[..., second] = ieee.canonical(narrow(ieee.fma(b, c, ieee.mul(a, s))))
    return out


def silu_and_mul(gate_up: F32, narrow: Narrow) -> F32:
    """gate / (1 + e^-gate) * up of gate_up [T,2F], narrowed."""
    gate, up = np.split(gate_up, 2, axis=1)
    sigmoid_inverse = ieee.add(np.float32(1), functions.exp(-gate))
    return ieee.canonical(narrow(ieee.mul(ieee.div(gate, sigmoid_inverse), up)))
