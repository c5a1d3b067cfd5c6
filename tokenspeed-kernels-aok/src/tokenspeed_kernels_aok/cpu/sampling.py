"""`sampling.block_sumexp`, `sampling.logprobs` and `sampling.sample` (rules 5 to 7 of the bit order)."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import float_code, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import library

TORCH_BLOCK = 4096
"""Entries that the `torch` order sums before it adds the sums left to right."""

_BLOCK_SUMEXP = struct.Struct("10q")
_LOGPROBS = struct.Struct("13q")
_SAMPLE = struct.Struct("13q")

_block_sumexp = library().kernel("block_sumexp", _BLOCK_SUMEXP)
_logprobs = library().kernel("logprobs", _LOGPROBS)
_sample = library().kernel("sample", _SAMPLE)


def block_sumexp(logits: torch.Tensor, row_max: torch.Tensor, temperature: torch.Tensor, block: int) -> torch.Tensor:
    """Sum of exp(logits / temperature - row_max) over each block of `block` entries: fp32[R, ceil(V / block)].

    logits [R,V] bf16 or fp32; row_max and temperature fp32[R]; temperature 0 counts as 1. Raises TypeError for other
    dtypes, ValueError for shapes that do not fit or a block below 1.
    """
    code = float_code("logits", logits)
    rows, vocabulary = logits.shape
    if block < 1:
        raise ValueError(f"block is {block}; expected at least 1")
    logits = unit_stride(logits)
    row_max = _per_row("row_max", row_max, torch.float32, rows)
    temperature = _per_row("temperature", temperature, torch.float32, rows)
    sums = logits.new_empty(rows, -(-vocabulary // block), dtype=torch.float32)
    if sums.numel():
        _block_sumexp(
            _BLOCK_SUMEXP.pack(
                logits.data_ptr(), row_max.data_ptr(), temperature.data_ptr(), sums.data_ptr(),
                rows, vocabulary, logits.stride(0), block, code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return sums


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    """Log-probabilities of `ids` (int64[R,M]) over the vocabulary, after temperature (fp32[R], 0 counts as 1): fp32[R,M].

    `torch` is (x - max) - log(sum) with the sum in blocks of 4,096; `megatron` is -(log(sum) - (x - max)) with the sum
    in blocks of `block`. NaN for an id outside the vocabulary. Raises TypeError for other dtypes, ValueError for shapes
    that do not fit, another order, or a block below 1.
    """
    code = float_code("logits", logits)
    same_dtype("ids", ids, torch.int64)
    rows, vocabulary = logits.shape
    if order not in ("torch", "megatron"):
        raise ValueError(f"logprob order {order!r} is not one of torch, megatron")
    if order == "megatron" and block < 1:
        raise ValueError(f"block is {block}; expected at least 1")
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"ids is {list(ids.shape)}, expected [{rows},M] for logits {list(logits.shape)}")
    logits, ids = unit_stride(logits), unit_stride(ids)
    temperature = _per_row("temperature", temperature, torch.float32, rows)
    out = logits.new_empty(ids.shape, dtype=torch.float32)
    if out.numel():
        _logprobs(
            _LOGPROBS.pack(
                logits.data_ptr(), ids.data_ptr(), temperature.data_ptr(), out.data_ptr(),
                rows, vocabulary, logits.stride(0), ids.shape[1], ids.stride(0),
                block if order == "megatron" else TORCH_BLOCK, order == "megatron", code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row of logits [R,V], int64[R]: what `tokenspeed.kernels.reference.sampling` describes.

    temperature, top_p, min_p fp32[R]; top_k int32[R]; seeds, positions int64[R]. -1 where the largest logit over
    temperature is not finite. Raises TypeError for other dtypes, ValueError for shapes that do not fit.
    """
    code = float_code("logits", logits)
    rows, vocabulary = logits.shape
    logits = unit_stride(logits)
    temperature = _per_row("temperature", temperature, torch.float32, rows)
    top_k = _per_row("top_k", top_k, torch.int32, rows)
    top_p = _per_row("top_p", top_p, torch.float32, rows)
    min_p = _per_row("min_p", min_p, torch.float32, rows)
    seeds = _per_row("seeds", seeds, torch.int64, rows)
    positions = _per_row("positions", positions, torch.int64, rows)
    out = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        _sample(
            _SAMPLE.pack(
                logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
                seeds.data_ptr(), positions.data_ptr(), out.data_ptr(),
                rows, vocabulary, logits.stride(0), code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def _per_row(what: str, tensor: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor:
    same_dtype(what, tensor, dtype)
    if tensor.shape != (rows,):
        raise ValueError(f"{what} is {list(tensor.shape)}, expected [{rows}] for {rows} rows of logits")
    return tensor.contiguous()
