"""`sampling.block_sumexp`, `sampling.logprobs` and `sampling.sample` (rules 5 to 7 of the bit order)."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

TORCH_BLOCK = 4096
"""Entries that the `torch` order sums before it adds the sums left to right."""

_BLOCK_SUMEXP = struct.Struct("10q")
_LOGPROBS = struct.Struct("13q")
_SAMPLE = struct.Struct("13q")


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
    """Log-probabilities of `ids` (int64[R,M]), over the vocabulary, after temperature (fp32[R], 0 counts as 1): [R,M].

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


# The self-check: a vocabulary of more than one block and an odd rest, every filter at least once.
_CHECKED_ROWS, _CHECKED_VOCABULARY = 4, 4500


def _checked_rows() -> tuple[torch.Tensor, torch.Tensor]:
    return (
        pattern(_CHECKED_ROWS, _CHECKED_VOCABULARY, dtype=torch.float32),
        torch.tensor([0.0, 1.0, 0.75, 3.0]),
    )


def _check_block_sumexp(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    logits, temperature = _checked_rows()
    most = torch.full((_CHECKED_ROWS,), 64.0)
    for dtype, code in DTYPE_CODES.items():
        x, sums = logits.to(dtype), torch.zeros(_CHECKED_ROWS, 2)
        call(
            _BLOCK_SUMEXP.pack(
                x.data_ptr(), most.data_ptr(), temperature.data_ptr(), sums.data_ptr(),
                _CHECKED_ROWS, _CHECKED_VOCABULARY, _CHECKED_VOCABULARY, 4400, code, 1,
            )
        )  # fmt: skip
        outputs.append(sums)
    return tuple(outputs)


def _check_logprobs(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    logits, temperature = _checked_rows()
    ids = torch.arange(-1, 2 * _CHECKED_ROWS - 1).view(_CHECKED_ROWS, 2)
    for dtype, code in DTYPE_CODES.items():
        x = logits.to(dtype)
        for block, negated in ((TORCH_BLOCK, 0), (1000, 1)):
            out = torch.zeros(_CHECKED_ROWS, 2)
            call(
                _LOGPROBS.pack(
                    x.data_ptr(), ids.data_ptr(), temperature.data_ptr(), out.data_ptr(),
                    _CHECKED_ROWS, _CHECKED_VOCABULARY, _CHECKED_VOCABULARY, 2, 2, block, negated, code, 1,
                )
            )  # fmt: skip
            outputs.append(out)
    return tuple(outputs)


def _check_sample(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    logits, temperature = _checked_rows()
    top_k = torch.tensor([0, 0, 40, 0], dtype=torch.int32)
    top_p, min_p = torch.tensor([1.0, 1.0, 0.9, 0.8]), torch.tensor([0.0, 0.0, 0.01, 0.0])
    seeds, positions = torch.tensor([1, -2, 3, 2**40]), torch.tensor([0, 7, 2**33, 9])
    for dtype, code in DTYPE_CODES.items():
        x, out = (logits / 64).to(dtype), torch.zeros(_CHECKED_ROWS, dtype=torch.int64)
        call(
            _SAMPLE.pack(
                x.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
                seeds.data_ptr(), positions.data_ptr(), out.data_ptr(),
                _CHECKED_ROWS, _CHECKED_VOCABULARY, _CHECKED_VOCABULARY, code, 1,
            )
        )  # fmt: skip
        outputs.append(out)
    return tuple(outputs)


_block_sumexp = checked("block_sumexp", _BLOCK_SUMEXP, _check_block_sumexp)
_logprobs = checked("logprobs", _LOGPROBS, _check_logprobs)
_sample = checked("sample", _SAMPLE, _check_sample)
