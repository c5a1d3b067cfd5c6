"""`sampling.sample`: argmax at temperature 0, else Gumbel-max over the tokens that top-k, top-p and min-p keep.

The rule is that of `tokenspeed.kernels.reference.sampling`, and every step of it is exact or elementwise, so no order
of additions is involved: counts and weights (multiples of 2^-40) are integers, maxima are exact, the noise is a
function of (seed, position, token id). The kept set is a bound: tokens above a value, and those equal to it up to some
id.

The bound of top-k and top-p is found by bisection over the 32-bit keys that order floats, one row a program; rows
without them skip it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.launch import TRITON_DTYPES, Form, launch
from tokenspeed_kernels_aok.triton.logprobs import PIECE, row_peak, row_peaks, scaled
from tokenspeed_kernels_aok.triton.noise import exp, gumbel, log

_LEAST_KEY = tl.constexpr(-(2**31))

# Vocabulary entries that the bisection reads at once.
_STEP = 4096


@triton.jit
def _key(z):
    """int32 that orders floats as their values do (-0 as +0); z is not NaN."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight(z, peak):
    """exp(z - peak) in units of 2^-40, rounded to nearest even, int64."""
    units = exp(z - peak).to(tl.float64) * 1099511627776.0
    return ((units + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)


@triton.jit
def _measure(logits, temperature, peak, vocabulary, least, WEIGH: tl.constexpr, STEP: tl.constexpr):
    """Over the tokens whose key is at least `least`: their number, or the sum of their weights; int64."""
    total = tl.zeros((), tl.int64)
    for first in range(0, vocabulary, STEP):
        lane = first + tl.arange(0, STEP)
        z = scaled(logits, lane, lane < vocabulary, temperature)
        chosen = (lane < vocabulary) & (_key(z) >= least)
        if WEIGH:
            total += tl.sum(tl.where(chosen, _weight(z, peak), 0), axis=0)
        else:
            total += tl.sum(chosen.to(tl.int64), axis=0)
    return total


@triton.jit
def _one_weight(key, peak):
    """Weight of a token with this key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return _weight(bits.to(tl.float32, bitcast=True), peak)


@triton.jit
def _nth_tie(logits, temperature, vocabulary, key, n, STEP: tl.constexpr):
    """Id of the n-th token, by ascending id, whose key is `key`; the vocabulary size when there are fewer."""
    found = vocabulary.to(tl.int64)
    before = tl.zeros((), tl.int64)
    for first in range(0, vocabulary, STEP):
        lane = first + tl.arange(0, STEP)
        z = scaled(logits, lane, lane < vocabulary, temperature)
        tie = ((lane < vocabulary) & (_key(z) == key)).to(tl.int64)
        rank = before + tl.cumsum(tie, axis=0)
        here = tl.min(tl.where((tie == 1) & (rank == n), lane.to(tl.int64), vocabulary.to(tl.int64)), axis=0)
        found = tl.minimum(found, here)
        before += tl.sum(tie, axis=0)
    return found


@triton.jit
def bound_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    peaks,
    bound_keys,
    bound_ids,
    vocabulary,
    row_stride,
    peak_count,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """The bound of one row: tokens with a larger key are kept, and those with this key up to this id."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    peak = row_peak(peaks, row, peak_count, WIDTH)
    bound = tl.full((), _LEAST_KEY, tl.int32)
    last_tie = vocabulary.to(tl.int64)
    some_k = (k > 0) & (k < vocabulary)
    finite = (peak == peak) & (tl.abs(peak) != float("inf"))
    if finite & (heat != 0.0) & (some_k | (p < 1.0)):
        z_row = logits + row * row_stride
        most = _key(peak).to(tl.int64)
        ties = vocabulary.to(tl.int64)
        if some_k:
            # The largest key that at least k tokens reach.
            low = tl.full((), _LEAST_KEY, tl.int64)
            high = most
            while low < high:
                middle = low + (high - low + 1) // 2
                if _measure(z_row, heat, peak, vocabulary, middle, False, STEP) >= k:
                    low = middle
                else:
                    high = middle - 1
            bound = low.to(tl.int32)
            ties = k - _measure(z_row, heat, peak, vocabulary, low + 1, False, STEP)
        if p < 1.0:
            # What top-k left: the tokens above its bound and `ties` of those on it.
            above = _measure(z_row, heat, peak, vocabulary, bound.to(tl.int64) + 1, True, STEP)
            on_bound = _measure(z_row, heat, peak, vocabulary, bound.to(tl.int64), True, STEP) - above
            if some_k:
                on_bound = ties * _one_weight(bound, peak)
            wanted = p.to(tl.float64) * (above + on_bound).to(tl.float64)
            # The largest key whose tokens weigh enough with those above it; the bound of top-k always does.
            low = bound.to(tl.int64)
            high = most
            while low < high:
                middle = low + (high - low + 1) // 2
                if _measure(z_row, heat, peak, vocabulary, middle, True, STEP).to(tl.float64) >= wanted:
                    low = middle
                else:
                    high = middle - 1
            if low > bound:
                ties = vocabulary.to(tl.int64)
            bound = low.to(tl.int32)
            # The fewest tokens on the bound that reach it.
            above = _measure(z_row, heat, peak, vocabulary, low + 1, True, STEP)
            each = _one_weight(bound, peak)
            fewest = tl.full((), 1, tl.int64)
            while fewest < ties:
                middle = (fewest + ties) // 2
                if (above + middle * each).to(tl.float64) >= wanted:
                    ties = middle
                else:
                    fewest = middle + 1
        last_tie = _nth_tie(z_row, heat, vocabulary, bound, ties, STEP)
    tl.store(bound_keys + row, bound)
    tl.store(bound_ids + row, last_tie)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    min_p,
    seeds,
    positions,
    peaks,
    bound_keys,
    bound_ids,
    best_scores,
    best_ids,
    vocabulary,
    row_stride,
    peak_count,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The best kept token of one piece (axis 1) of one row (axis 0): score and id, ties to the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    lane = piece * PIECE + tl.arange(0, PIECE)
    heat = tl.load(temperature + row)
    z = scaled(logits + row * row_stride, lane, lane < vocabulary, heat)
    score = z
    if heat != 0.0:
        bound = tl.load(bound_keys + row)
        key = _key(z)
        kept = (key > bound) | ((key == bound) & (lane <= tl.load(bound_ids + row)))
        floor = tl.load(min_p + row)
        peak = row_peak(peaks, row, peak_count, WIDTH)
        kept = kept & (z - peak >= log(tl.zeros((1,), tl.float32) + floor))
        noisy = z + gumbel(piece * PIECE, tl.load(seeds + row), tl.load(positions + row), PIECE)
        score = tl.where(kept, noisy, float("-inf"))
    best = tl.max(score, axis=0)
    first = tl.min(tl.where((score == best) & (lane < vocabulary), lane, vocabulary), axis=0)
    tl.store(best_scores + row * tl.num_programs(1) + piece, best)
    tl.store(best_ids + row * tl.num_programs(1) + piece, first)


@triton.jit
def pick_kernel(peaks, best_scores, best_ids, ids, pieces, WIDTH: tl.constexpr):
    """The best token of one row's pieces; -1 when the row's largest z is not finite."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    peak = row_peak(peaks, row, pieces, WIDTH)
    score = tl.load(best_scores + row * pieces + lane, mask=lane < pieces, other=float("-inf"))
    token = tl.load(best_ids + row * pieces + lane, mask=lane < pieces, other=0x7FFFFFFF)
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0).to(tl.int64)
    finite = (peak == peak) & (tl.abs(peak) != float("inf"))
    tl.store(ids + row, tl.where(finite, chosen, -1))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row of logits [R,V], int64[R]; -1 where a row's largest z is not finite."""
    rows, vocabulary = logits.shape
    device = logits.device
    if not vocabulary or not rows:
        return torch.full((rows,), -1, dtype=torch.int64, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    peaks = row_peaks(logits, temperature)
    pieces = peaks.shape[1]
    width = triton.next_power_of_2(pieces)
    bound_keys = torch.empty(rows, dtype=torch.int32, device=device)
    bound_ids = torch.empty(rows, dtype=torch.int64, device=device)
    launch(
        bound_kernel,
        (rows,),
        device,
        logits,
        temperature,
        top_k,
        top_p,
        peaks,
        bound_keys,
        bound_ids,
        vocabulary,
        logits.stride(0),
        pieces,
        WIDTH=width,
        STEP=_STEP,
        num_warps=16,
    )
    best_scores = torch.empty_like(peaks)
    best_ids = torch.empty(peaks.shape, dtype=torch.int32, device=device)
    launch(
        draw_kernel,
        (rows, pieces),
        device,
        logits,
        temperature,
        min_p,
        seeds,
        positions,
        peaks,
        bound_keys,
        bound_ids,
        best_scores,
        best_ids,
        vocabulary,
        logits.stride(0),
        pieces,
        WIDTH=width,
        PIECE=PIECE,
        num_warps=8,
    )
    launch(pick_kernel, (rows,), device, peaks, best_scores, best_ids, ids, pieces, WIDTH=width, num_warps=1)
    return ids


def forms(target: str) -> Iterator[Form]:
    """Every kernel of the file, for a vocabulary of up to 64 pieces."""
    sizes = {"vocabulary": "i32", "row_stride": "i32", "peak_count": "i32"}
    for dtype in TRITON_DTYPES.values():
        logits = {"logits": f"*{dtype}", "temperature": "*fp32"}
        bounds = {"peaks": "*fp32", "bound_keys": "*i32", "bound_ids": "*i64"}
        yield Form(
            f"sampling.bound.{dtype}",
            target,
            bound_kernel,
            logits | {"top_k": "*i32", "top_p": "*fp32"} | bounds | sizes,
            {"WIDTH": 64, "STEP": _STEP},
            ("logits", "row_stride"),
            num_warps=16,
        )
        yield Form(
            f"sampling.draw.{dtype}",
            target,
            draw_kernel,
            logits
            | {"min_p": "*fp32", "seeds": "*i64", "positions": "*i64"}
            | bounds
            | {"best_scores": "*fp32", "best_ids": "*i32"}
            | sizes,
            {"WIDTH": 64, "PIECE": PIECE},
            ("logits", "row_stride"),
            num_warps=8,
        )
    yield Form(
        "sampling.pick",
        target,
        pick_kernel,
        {"peaks": "*fp32", "best_scores": "*fp32", "best_ids": "*i32", "ids": "*i64", "pieces": "i32"},
        {"WIDTH": 64},
        num_warps=1,
    )
