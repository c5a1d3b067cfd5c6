"""Log-probabilities, Philox, Gumbel noise and sampling: the published order, by a full sort and not a selection."""

from __future__ import annotations

import numpy as np

from oracle import functions, ieee
from oracle.ieee import F32

SUB_BLOCK = 4096
LANES = 64
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def scaled(logits: F32, temperature: float) -> F32:
    """z = logits / temperature; temperature 0 counts as 1."""
    return ieee.div(logits, np.float32(temperature or 1.0))


def _maximum(z: F32) -> np.float32:
    """The largest element, +0 for -0; NaN when any is NaN."""
    return ieee.add(z.max(), np.float32(0))[()]


def block_sum(terms: F32) -> np.float32:
    """Sum of one block: sub-blocks of 4,096 left to right, inside each 64 lanes and the halving tree."""
    total = None
    for start in range(0, len(terms), SUB_BLOCK):
        part = terms[start : start + SUB_BLOCK]
        part = np.concatenate([part, np.zeros(-len(part) % LANES, np.float32)]).reshape(-1, LANES)
        lanes = np.zeros(LANES, np.float32)
        for row in part:
            lanes = ieee.add(lanes, row)
        folded = ieee.fold_halves(lanes)
        total = folded if total is None else ieee.add(total, folded)
    assert total is not None
    return total[()]


def block_sumexp(logits: F32, row_max: float, temperature: float, block: int) -> F32:
    """Sums of exp(z - row_max) over the blocks of one row."""
    terms = functions.exp(ieee.sub(scaled(logits, temperature), np.float32(row_max)))
    return ieee.canonical([block_sum(terms[start : start + block]) for start in range(0, len(terms), block)])


def logprobs(logits: F32, ids: list[int], temperature: float, order: str, block: int) -> F32:
    """Log-probabilities of `ids` in one row."""
    z = scaled(logits, temperature)
    most = _maximum(z)
    sums = block_sumexp(logits, most, temperature, block if order == "megatron" else SUB_BLOCK)
    total = sums[0]
    for one in sums[1:]:
        total = ieee.add(total, one)
    log_sum = functions.log(total)
    x = ieee.sub(z[ids], most)
    return ieee.canonical(-ieee.sub(log_sum, x) if order == "megatron" else ieee.sub(x, log_sum))


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10: four uint32 words (held in uint64) for each counter."""
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [np.uint64(word) for word in key]
    for _ in range(10):
        p0, p1 = np.uint64(_MULTIPLIERS[0]) * c[0], np.uint64(_MULTIPLIERS[1]) * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & _LOW, (p0 >> 32) ^ c[3] ^ k[1], p0 & _LOW]
        k = [(word + np.uint64(step)) & _LOW for word, step in zip(k, _WEYL, strict=True)]
    return c


def uniform(seed: int, position: int, ids: np.ndarray) -> F32:
    """u in (0, 1) of each token id."""
    quads = ids.astype(np.uint64) >> 2
    zeros = np.zeros_like(quads)
    words = philox4x32(
        (quads, zeros, zeros + np.uint64(position & 0xFFFFFFFF), zeros + np.uint64(position >> 32 & 0xFFFFFFFF)),
        (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF),
    )
    word = np.stack(words)[ids & 3, np.arange(len(ids))]
    return ieee.mul(ieee.add((word >> 9).astype(np.float32), np.float32(0.5)), np.float32(2.0**-23))


def gumbel(seed: int, position: int, ids: np.ndarray) -> F32:
    """-log(-log(u)) of each token id."""
    return -functions.log(-functions.log(uniform(seed, position, ids)))


def kept(z: F32, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that the filters keep, in the order of falling z, ties by rising id."""
    order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))
    below = ieee.sub(z, _maximum(z))
    count = top_k if 0 < top_k < len(z) else len(z)
    if np.float32(top_p) < 1:
        weights = [round(float(p) * 2**40) for p in functions.exp(below[order[:count]])]  # Python rounds halves to even
        goal = float(np.float32(top_p)) * float(sum(weights))
        cumulative, count = 0, 0
        while count == 0 or float(cumulative) < goal:
            cumulative += weights[count]
            count += 1
    if min_p > 0:
        count = min(count, int((below >= functions.log(np.float32(min_p))).sum()))
    return order[: max(count, 1)]


def sample(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """The token of one row; -1 when its largest z is not finite."""
    z = scaled(logits, temperature)
    if not np.isfinite(z.max()):
        return -1
    if temperature == 0:
        return int(np.flatnonzero(z == z.max())[0])
    ids = np.sort(kept(z, top_k, top_p, min_p))
    score = ieee.add(z[ids], gumbel(seed, position, ids))
    return int(ids[score == score.max()][0])
