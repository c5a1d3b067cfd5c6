"""The indexer and attention over a selection, query by query. Knows nothing of pages, batches or threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracle import attention, ieee
from oracle.ieee import F32

LANES = 16


def index_scores(q: F32, weights: F32, keys: F32, scale: float) -> F32:
    """Scores [N] of one query: q [Hi, C], weights [Hi], keys [N, C]."""
    heads, width = q.shape
    lanes = np.zeros((len(keys), LANES), np.float32)
    for head in range(heads):
        product = np.zeros(len(keys), np.float32)
        for pair in range(width // 2):
            for i in (2 * pair + 1, 2 * pair):
                product = ieee.fma(q[head, i], keys[:, i], product)
        product = ieee.mul(product, np.float32(scale))
        positive = np.where(product < 0, np.float32(0), product)
        lanes[:, head % LANES] = ieee.fma(weights[head], positive, lanes[:, head % LANES])
    return ieee.canonical(ieee.fold_halves(lanes))


def index_topk(scores: F32, k: int) -> list[int]:
    """Positions of the k best of scores [N], best first: NaN, then falling, equal ones by ascending position."""
    flushed = ieee.daz(scores).tolist()
    nans = [i for i, score in enumerate(flushed) if score != score]
    numbers = [i for i, score in enumerate(flushed) if score == score]
    return [*nans, *sorted(numbers, key=lambda i: (-flushed[i], i))][:k]


def attention_over(q: F32, entries: F32, positions: Sequence[int], scale: float, latent: int) -> F32:
    """One query q [Hq, C] over the entries [N, C] at `positions`, reduced in the order given: fp32 [Hq, R]."""
    met = entries[list(positions)][:, None]
    return attention.attention_row(q, met, met, scale)[:, :latent]
