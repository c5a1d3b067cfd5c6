"""Arithmetic that every GPU must do alike: fixed trees, rounding, and (in `noise`) exp, log and Philox.

Device functions only; nothing here knows an operator.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _log2(n: int) -> int:
    return int(n).bit_length() - 1


@triton.jit
def tree_sum(x):
    """Sum over the last axis (a power of two, n) of a 1-D or 2-D tile: element i + element i + n/2, until one is left.

    Each step reduces pairs, and a + b = b + a, so the tree is the same however the tile is spread over threads. In the
    matrix unit's layout the first steps stay inside a thread.
    """
    for _ in tl.static_range(_log2(x.shape[-1])):
        if len(x.shape) == 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), axis=0)
        else:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    if len(x.shape) == 1:
        return tl.sum(x, axis=0)
    else:
        return tl.sum(x, axis=1)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 to DTYPE with one rounding to nearest even; a NaN becomes a quiet NaN."""
    if EMULATE and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        return tl.where(x != x, 0x7FFF, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, EMULATE: tl.constexpr):
    """acc + a @ b in fp32 (never TF32), K ascending."""
    if EMULATE:
        # Not tl.dot: the interpreter hands it to a BLAS, whose order of additions follows the shape of the tile.
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
