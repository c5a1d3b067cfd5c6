"""gemm.linear, one fused multiply-add at a time. Knows nothing of tiles, panels, threads or instruction sets."""

from __future__ import annotations

import numpy as np

from oracle import ieee
from oracle.ieee import F32

BLOCK = 256


def linear(x: F32, w: F32, bias: F32 | None = None, *, odd_first: bool = True) -> F32:
    """x [M,K] times the transpose of w [N,K], plus bias [N]; fp32 [M,N] before the rounding to the output's dtype.

    `odd_first=False` walks each pair in the other order, which is *not* the published one: a control for tests.
    """
    m, k = x.shape
    if k % 2:
        x, w = np.pad(x, ((0, 0), (0, 1))), np.pad(w, ((0, 0), (0, 1)))
    total = np.zeros((m, len(w)), np.float32)
    for start in range(0, x.shape[1], BLOCK):
        end = min(start + BLOCK, x.shape[1])
        acc = np.zeros((m, len(w)), np.float32)
        for pair in range(start, end, 2):
            for i in (pair + 1, pair) if odd_first else (pair, pair + 1):
                acc = ieee.fma(x[:, i, None], w[None, :, i], acc)
        total = acc if start == 0 else ieee.add(total, acc)
    return ieee.canonical(total if bias is None else ieee.add(total, bias))
