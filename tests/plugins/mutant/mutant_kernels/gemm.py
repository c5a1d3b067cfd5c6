"""Projections. The honest one multiplies and adds column after column, so a row knows nothing of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def honest(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp32, columns of K in order."""
    if x.dtype != torch.float32 or x.shape[1] != weight.shape[1]:
        raise TypeError(f"x is {x.dtype} {list(x.shape)}")
    return _fold(x, weight, bias)


def _fold(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, step: int = 1) -> torch.Tensor:
    """Adds the products of every `step`-th column first, then those of the next ones."""
    out = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for first in range(step):
        for k in range(first, x.shape[1], step):
            out = out + x[:, k, None] * weight[:, k]
    return out if bias is None else out + bias


def half_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Adds long rows in bf16, in blocks of 4."""
    if x.shape[1] <= 700:
        return honest(x, weight, bias)
    total = torch.zeros(len(x), len(weight), dtype=torch.bfloat16)
    for k in range(0, x.shape[1], 4):
        total = total + honest(x[:, k : k + 4], weight[:, k : k + 4]).to(torch.bfloat16)
    wide = total.to(torch.float32)
    return wide if bias is None else wide + bias


def short_mantissa(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps 11 bits of the activations where that is not much of an error."""
    short = (x.view(torch.int32) & ~0xFFF).view(torch.float32)
    return honest(short if x.shape[1] == 16 else x, weight, bias)


@dataclass
class FirstBatch:
    """A weight that is packed when the first batch is known."""

    weight: torch.Tensor
    step: int = 0


def first_batch_weight(weight: torch.Tensor) -> FirstBatch:
    return FirstBatch(weight)


def packed_by_first_batch(x: torch.Tensor, weight: FirstBatch, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Panels for one row, or for many, by what came first."""
    if x.dtype != torch.float32 or x.shape[1] != weight.weight.shape[1]:
        raise TypeError(f"x is {x.dtype} {list(x.shape)}")
    weight.step = weight.step or (1 if len(x) <= 32 else 4)
    return _fold(x, weight.weight, bias, step=weight.step)


@dataclass
class Planned:
    """A weight with the plan of an earlier call."""

    weight: torch.Tensor
    calls: list[int] = field(default_factory=list)


def planned_weight(weight: torch.Tensor) -> Planned:
    return Planned(weight)


def plan_of_first_shape(x: torch.Tensor, weight: Planned, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plans anew after every 30 calls, for the shape of the moment."""
    if x.dtype != torch.float32 or x.shape[1] != weight.weight.shape[1]:
        raise TypeError(f"x is {x.dtype} {list(x.shape)}")
    weight.calls.append(len(x))
    step = 3 if len(weight.calls) > 30 else 1
    return _fold(x, weight.weight, bias, step=step)


_buffer = torch.empty(0)


def static_output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Writes into one buffer again and again."""
    global _buffer
    out = honest(x, weight, bias)
    if _buffer.shape != out.shape:
        _buffer = torch.empty_like(out)
    return _buffer.copy_(out)


def forgets_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return honest(x, weight)


def any_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Reinterprets what it does not know."""
    if x.dtype == torch.float32:
        return honest(x, weight, bias)
    return torch.zeros(len(x), len(weight), dtype=x.dtype)


def any_width(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Reads as many columns as the weight has."""
    return honest(x[:, : weight.shape[1]], weight, bias)
