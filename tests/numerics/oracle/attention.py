"""attention.paged, row by row and key by key. Knows nothing of pages, batches or threads."""

from __future__ import annotations

import numpy as np

from oracle import functions, ieee
from oracle.ieee import F32

CHUNK = 256
LANES = 16


def attention_row(q: F32, keys: F32, values: F32, scale: float, window: int = 0) -> F32:
    """One query: q [Hq, D] at the position of the last of the keys [N, Hkv, D]; fp32 [Hq, D] before any rounding."""
    return attention_rows(q[None], keys, values, np.array([len(keys) - 1]), scale, window)[0]


def attention_rows(q: F32, keys: F32, values: F32, positions: np.ndarray, scale: float, window: int = 0) -> F32:
    """Queries q [R, Hq, D] at absolute `positions` [R] over one sequence (keys, values [N, Hkv, D]): fp32 like q."""
    rows, heads, d = q.shape
    group = heads // keys.shape[1]
    factor = np.float32(scale * 1.4426950408889634)
    maximum = np.zeros((rows, heads), np.float32)
    total = np.zeros((rows, heads), np.float32)
    output = np.zeros((rows, heads, d), np.float32)
    started = np.zeros(rows, bool)
    first = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
    for start in range(0, int(positions.max()) + 1, CHUNK):
        here = np.arange(start, min(start + CHUNK, len(keys)))
        visible = (here >= first[:, None]) & (here <= positions[:, None])  # [R, keys]
        seen = visible.any(axis=1)
        if not seen.any():
            continue
        k = np.repeat(keys[here], group, axis=1).transpose(1, 0, 2)  # [Hq, keys, D]
        v = np.repeat(values[here], group, axis=1)  # [keys, Hq, D]
        m, mass, o = _chunk(q, k, v, visible[:, None, :], factor)
        most = np.where(m > maximum, m, maximum)
        base = np.where(most == -np.inf, np.float32(0), most)
        old, new = functions.exp2(ieee.sub(maximum, base)), functions.exp2(ieee.sub(m, base))
        folded_l = ieee.fma(mass, new, ieee.mul(total, old))
        folded_o = ieee.fma(o, new[..., None], ieee.mul(output, old[..., None]))
        fold, begin = (seen & started)[:, None], (seen & ~started)[:, None]
        maximum = np.where(fold, most, np.where(begin, m, maximum))
        total = np.where(fold, folded_l, np.where(begin, mass, total))
        output = np.where(fold[..., None], folded_o, np.where(begin[..., None], o, output))
        started |= seen
    return ieee.canonical(ieee.div(output, total[..., None]))


def _chunk(q: F32, k: F32, v: F32, visible: np.ndarray, factor: np.float32) -> tuple[F32, F32, F32]:
    """Maximum [R, Hq], sum [R, Hq] and output [R, Hq, D] of one chunk: k [Hq, keys, D], v [keys, Hq, D]."""
    rows, heads, d = q.shape
    score = np.zeros((rows, heads, k.shape[1]), np.float32)
    for pair in range(d // 2):
        for i in (2 * pair + 1, 2 * pair):
            score = ieee.fma(q[:, :, i, None], k[None, :, :, i], score)
    score = np.where(visible, ieee.mul(score, factor), np.float32(-np.inf))
    m = np.where(np.isnan(score), np.float32(-np.inf), score).max(axis=-1)
    base = np.where(m == -np.inf, np.float32(0), m)
    p = functions.exp2(ieee.sub(score, base[..., None]))
    lanes = np.zeros((rows, heads, LANES), np.float32)
    for key in range(p.shape[-1]):
        lanes[..., key % LANES] = ieee.add(lanes[..., key % LANES], p[..., key])
    output = np.zeros((rows, heads, d), np.float32)
    for key in range(p.shape[-1]):
        added = ieee.fma(p[..., key, None], v[None, key], output)
        output = np.where(visible[:, :, key, None], added, output)
    return m, ieee.fold_halves(lanes), output
