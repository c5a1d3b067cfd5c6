"""`sampling.block_sumexp` and `sampling.logprobs` in the block order `aok_tree`, and the largest logit of a row.

z = logit / temperature (IEEE division, 0 counts as 1). A vocabulary block is cut into pieces of 4,096 entries; inside a
piece, exp(z - max) is summed in 64 lanes (entry mod 64, ascending) that fold by halves; pieces are added left to right,
then blocks left to right. Missing entries add +0. `torch` order is (z - max) - log(sum) with one piece a block;
`megatron` order is -(log(sum) - (z - max)) with the caller's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.arith import tree_sum
from tokenspeed_kernels_aok.triton.launch import TRITON_DTYPES, Form, launch
from tokenspeed_kernels_aok.triton.noise import exp, log

PIECE = 4096
"""Vocabulary entries that one program reads; part of the bit order."""

# Loads issued ahead of the additions that use them.
_AHEAD = 8

# A piece is summed in 64 lanes; part of the bit order.
_LANES = 64

# Pieces that a program sums side by side.
_TOGETHER = 8

# Tokens of a row that a program scores at once.
_SCORES = 32


@triton.jit
def scaled(logits, at, mask, temperature):
    """z of the entries `at`, -infinity where masked."""
    value = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(value, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(value))


@triton.jit
def row_peak(peaks, row, pieces, WIDTH: tl.constexpr):
    """Largest z of a row from its pieces' (+0 rather than -0); NaN when one is NaN."""
    lane = tl.arange(0, WIDTH)
    values = tl.load(peaks + row * pieces + lane, mask=lane < pieces, other=float("-inf"))
    broken = tl.max((values != values).to(tl.int32), axis=0)
    peak = tl.max(tl.where(values != values, float("-inf"), values), axis=0) + 0.0
    return tl.where(broken != 0, float("nan"), peak)


@triton.jit
def peak_kernel(logits, temperature, peaks, vocabulary, row_stride, PIECE: tl.constexpr):
    """Largest z of one piece (axis 1) of one row (axis 0), NaN when any is NaN."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    lane = piece * PIECE + tl.arange(0, PIECE)
    z = scaled(logits + row * row_stride, lane, lane < vocabulary, tl.load(temperature + row))
    broken = tl.max((z != z).to(tl.int32), axis=0)
    peak = tl.max(tl.where(z != z, float("-inf"), z), axis=0)
    tl.store(peaks + row * tl.num_programs(1) + piece, tl.where(broken != 0, float("nan"), peak))


@triton.jit
def sumexp_kernel(
    logits,
    temperature,
    peaks,
    sums,
    vocabulary,
    row_stride,
    block,
    peak_count,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Sum of exp(z - max) over one vocabulary block (axis 1) of one row (axis 0), TOGETHER pieces at a time."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * block
    end = tl.minimum(begin + block, vocabulary)
    heat = tl.load(temperature + row)
    peak = row_peak(peaks, row, peak_count, WIDTH)
    piece = tl.arange(0, TOGETHER)
    first_at = piece[:, None] * PIECE + tl.arange(0, LANES)[None, :]
    total = 0.0
    for start in range(begin, end, PIECE * TOGETHER):
        lanes = tl.zeros((TOGETHER, LANES), tl.float32)
        for step in range(0, tl.minimum(PIECE, end - start), LANES * AHEAD):
            entries = ()
            for ahead in tl.static_range(AHEAD):
                entry = start + first_at + (step + ahead * LANES)
                entries = entries + (scaled(logits + row * row_stride, entry, entry < end, heat),)
            for ahead in tl.static_range(AHEAD):
                entry = start + first_at + (step + ahead * LANES)
                lanes += tl.where(entry < end, exp(entries[ahead] - peak), 0.0)
        piece_sums = tree_sum(lanes)
        for index in tl.static_range(TOGETHER):
            total += tl.sum(tl.where(piece == index, piece_sums, 0.0), axis=0)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def _left_fold(values, count, AHEAD: tl.constexpr):
    """values[0] + values[1] + … left to right."""
    total = tl.load(values)
    for first in range(1, count, AHEAD):
        loaded = ()
        for ahead in tl.static_range(AHEAD):
            loaded = loaded + (tl.load(values + (first + ahead), mask=first + ahead < count, other=0.0),)
        for ahead in tl.static_range(AHEAD):
            total = tl.where(first + ahead < count, total + loaded[ahead], total)
    return total


@triton.jit(do_not_specialize=["count", "id_row"])
def score_kernel(
    logits,
    temperature,
    peaks,
    sums,
    ids,
    out,
    vocabulary,
    row_stride,
    peak_count,
    blocks,
    count,
    id_row,
    MEGATRON: tl.constexpr,
    WIDTH: tl.constexpr,
    SCORES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """SCORES tokens (axis 1) of one row (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * SCORES + tl.arange(0, SCORES)
    token = tl.load(ids + row * id_row + lane, mask=lane < count, other=-1)
    known = (token >= 0) & (token < vocabulary)
    z = scaled(logits + row * row_stride, token, known, tl.load(temperature + row))
    x = z - row_peak(peaks, row, peak_count, WIDTH)
    log_sum = log(tl.full((SCORES,), 0.0, tl.float32) + _left_fold(sums + row * blocks, blocks, AHEAD))
    if MEGATRON:
        score = -(log_sum - x)
    else:
        score = x - log_sum
    tl.store(out + row * count + lane, tl.where(known, score, float("nan")), mask=lane < count)


def row_peaks(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Largest z of each piece, fp32[R, pieces]."""
    rows, vocabulary = logits.shape
    peaks = torch.empty(rows, triton.cdiv(vocabulary, PIECE), dtype=torch.float32, device=logits.device)
    operands = (logits, temperature, peaks)
    launch(peak_kernel, peaks.shape, logits.device, *operands, vocabulary, logits.stride(0), PIECE=PIECE, num_warps=8)
    return peaks


def block_sumexp(logits: torch.Tensor, row_max: torch.Tensor, temperature: torch.Tensor, block: int) -> torch.Tensor:
    """Sum of exp(z - row_max) over each block of `block` vocabulary entries: fp32[R, ceil(V / block)]."""
    rows, vocabulary = logits.shape
    sums = torch.empty(rows, triton.cdiv(vocabulary, block), dtype=torch.float32, device=logits.device)
    if sums.numel():
        _sum_blocks(logits, row_max.unsqueeze(-1), temperature, block, sums)
    return sums


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    """Log-probabilities of `ids` (int64[R,M]) after temperature, over the whole vocabulary: fp32[R,M].

    An id outside the vocabulary gives NaN. Raises ValueError for an order other than `torch` and `megatron`.
    """
    if order not in ("torch", "megatron"):
        raise ValueError(f"logprob order {order!r} is not one of torch, megatron")
    rows, vocabulary = logits.shape
    out = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if not out.numel():
        return out
    if order == "torch":
        block = PIECE
    peaks = row_peaks(logits, temperature)
    sums = torch.empty(rows, triton.cdiv(vocabulary, block), dtype=torch.float32, device=logits.device)
    _sum_blocks(logits, peaks, temperature, block, sums)
    launch(
        score_kernel,
        (rows, triton.cdiv(ids.shape[1], _SCORES)),
        logits.device,
        logits,
        temperature,
        peaks,
        sums,
        ids,
        out,
        vocabulary,
        logits.stride(0),
        peaks.shape[1],
        sums.shape[1],
        ids.shape[1],
        ids.stride(0),
        MEGATRON=order == "megatron",
        WIDTH=triton.next_power_of_2(peaks.shape[1]),
        SCORES=_SCORES,
        AHEAD=_AHEAD,
        num_warps=1,
    )
    return out


def _sum_blocks(
    logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor, block: int, sums: torch.Tensor
) -> None:
    """Fill `sums` [R, blocks]; peaks [R, n] are the largest z of n parts of each row, and contiguous."""
    launch(
        sumexp_kernel,
        sums.shape,
        logits.device,
        logits,
        temperature,
        peaks.contiguous(),
        sums,
        logits.shape[1],
        logits.stride(0),
        block,
        peaks.shape[1],
        WIDTH=triton.next_power_of_2(peaks.shape[1]),
        **_sum_constants(block),
        num_warps=4,
    )


def _sum_constants(block: int) -> dict[str, int]:
    together = min(_TOGETHER, triton.next_power_of_2(triton.cdiv(block, PIECE)))
    return {"PIECE": PIECE, "LANES": _LANES, "TOGETHER": together, "AHEAD": _AHEAD}


def forms(target: str) -> Iterator[Form]:
    """Every kernel of the file, for a vocabulary of up to 64 pieces."""
    for dtype in TRITON_DTYPES.values():
        logits = {"logits": f"*{dtype}", "temperature": "*fp32"}
        yield Form(
            f"sampling.peak.{dtype}",
            target,
            peak_kernel,
            logits | {"peaks": "*fp32", "vocabulary": "i32", "row_stride": "i32"},
            {"PIECE": PIECE},
            ("logits", "row_stride"),
            num_warps=8,
        )
        sizes = ("vocabulary", "row_stride", "block", "peak_count")
        for block in (PIECE, 32768):
            yield Form(
                f"sampling.sumexp.{dtype}.{block}",
                target,
                sumexp_kernel,
                logits | {"peaks": "*fp32", "sums": "*fp32"} | dict.fromkeys(sizes, "i32"),
                {"WIDTH": 64} | _sum_constants(block),
                ("logits", "row_stride"),
            )
        sizes = ("vocabulary", "row_stride", "peak_count", "blocks", "count", "id_row")
        for megatron in (False, True):
            yield Form(
                f"sampling.score.{'megatron' if megatron else 'torch'}.{dtype}",
                target,
                score_kernel,
                logits
                | {"peaks": "*fp32", "sums": "*fp32", "ids": "*i64", "out": "*fp32"}
                | dict.fromkeys(sizes, "i32"),
                {"MEGATRON": megatron, "WIDTH": 64, "SCORES": _SCORES, "AHEAD": _AHEAD},
                ("logits", "row_stride"),
                num_warps=1,
            )
