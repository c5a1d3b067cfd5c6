"""moe.route and moe.experts, token by token. Knows nothing of sorting by expert, strips of columns or batches."""

from __future__ import annotations

import numpy as np

from oracle import functions, gemm, ieee, rows
from oracle.ieee import F32
from oracle.rows import Narrow

LANES = 64


def softmax(x: F32) -> F32:
    """Softmax of one row."""
    most = np.float32(np.nan) if np.isnan(x).any() else x.max()
    e = functions.exp(ieee.sub(x, most))
    padded = np.pad(e, (0, -len(e) % LANES)).reshape(-1, LANES)
    lanes = np.zeros(LANES, np.float32)
    for part in padded:
        lanes = ieee.add(lanes, part)
    return ieee.canonical(ieee.div(e, ieee.fold_halves(lanes)))


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    return ieee.canonical(ieee.div(np.float32(1), ieee.add(np.float32(1), functions.exp(-x))))


def best(values: F32, count: int) -> list[int]:
    """Indices of the largest values: NaN first, then falling, equal ones by rising index."""
    values = ieee.daz(values)
    ranks = np.where(np.isnan(values), 0.0, -values.astype(np.float64))
    return list(np.lexsort((np.arange(len(values)), ranks, ~np.isnan(values)))[:count])


def route_row(
    logits: F32,
    bias: F32 | None,
    top_k: int,
    scoring: str,
    form: str,
    normalise: bool,
    scale: float,
    groups: int,
    kept: int,
) -> tuple[F32, list[int]]:
    """Weights and experts of one token."""
    if form == "fused" and scoring == "softmax" and bias is None and groups == 1:
        ids = best(logits, top_k)
        weights = functions.exp(ieee.sub(logits[ids], logits[ids[0]])) if normalise else softmax(logits)[ids]
    else:
        scores = softmax(logits) if scoring == "softmax" else sigmoid(logits)
        choice = scores if bias is None else ieee.add(scores, bias)
        size = len(choice) // groups
        eligible = np.arange(len(choice))
        if groups > 1:
            parts = choice.reshape(groups, size)
            pairs = [part[best(part, 2)] for part in parts]
            good = best(np.array([ieee.add(a, b)[()] for a, b in pairs], np.float32), kept)
            eligible = np.flatnonzero(np.isin(np.arange(len(choice)) // size, good))
        ids = list(eligible[best(choice[eligible], top_k)])
        weights = scores[ids]
    if normalise:
        total = np.zeros((), np.float32)
        for weight in weights:
            total = ieee.add(total, weight)
        weights = ieee.div(weights, ieee.add(total, np.float32(1e-20)))
    return ieee.canonical(ieee.mul(weights, np.float32(scale))), ids


def expert(x: F32, gate_up: F32, down: F32, narrow: Narrow) -> F32:
    """The gated MLP of one expert on rows x [N,H]."""
    return narrow(gemm.linear(rows.silu_and_mul(narrow(gemm.linear(x, gate_up)), narrow), down))


def experts(
    x: F32, gate_up: F32, down: F32, weights: F32, ids: np.ndarray, narrow: Narrow, *, turned: bool = False
) -> F32:
    """Weighted sum in slot order of x [T,H]; `turned` adds from the last slot on, which is *not* the order."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        slots = list(zip(weights[t], ids[t], strict=True))
        for weight, chosen in reversed(slots) if turned else slots:
            known = chosen < len(gate_up)
            y = expert(row[None], gate_up[chosen], down[chosen], narrow)[0] if known else row
            out[t] = ieee.add(out[t], ieee.mul(weight, y))
    return ieee.canonical(narrow(out))
