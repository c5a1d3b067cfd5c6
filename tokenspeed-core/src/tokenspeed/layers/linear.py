"""Projections: one weight, or several that read the same input and are stored as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenspeed.kernels.spec import WEIGHT_FORMAT, StoredPart
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import TensorTarget, WeightLayer


class Linear(WeightLayer):
    """x [T,K] -> [T,N], with an optional bias.

    In a quantised checkpoint the weight is several tensors, which the chosen kernel's spec describes (`store_as`).
    """

    may_be_quantised = True

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = self.new_weight((out_features, in_features), ctx.dtype)
        self.bias = self.new_weight((out_features,), ctx.dtype) if bias else None
        self.stored: tuple[StoredPart, ...] = ()
        quantised = bool(ctx.weight_format) and self.may_be_quantised
        # The format says what the weight's dtype is.
        dtypes = {"x": ctx.dtype} if quantised else {"x": ctx.dtype, "weight": ctx.dtype}
        self.linear = ctx.operator(
            "gemm.linear",
            dtypes=dtypes,
            facts={"k": in_features, "n": out_features},
            traits={WEIGHT_FORMAT: ctx.weight_format} if quantised else None,
        )
        self.packed: Any = None

    def store_as(self, parts: tuple[StoredPart, ...]) -> None:
        """Take these tensors of a checkpoint in the place of the weight; before anything is allocated."""
        assert self.weight is not None
        axes = dict(zip(("N", "K"), self.weight.shape, strict=True))
        self.weight = None
        self.stored = parts
        for part in parts:
            shape = tuple(_size(axis, axes) for axis in part.shape.split(","))
            setattr(self, part.suffix, self.new_weight(shape, getattr(torch, part.dtype)))

    def pack(self) -> None:
        if self.stored:
            self.packed = self.linear.prepare({part.suffix: getattr(self, part.suffix).data for part in self.stored})
            for part in self.stored:
                setattr(self, part.suffix, None)
            return
        assert self.weight is not None
        self.packed = self.linear.prepare(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x, self.packed, self.bias)
        return out


def _size(axis: str, axes: Mapping[str, int]) -> int:
    """`N`, or `K/128`, rounded up."""
    name, _, divisor = axis.partition("/")
    return -(-axes[name] // int(divisor or 1))


class MergedLinear(Linear):
    """Several projections of one input as one, their rows one after another: q, k and v, or gate and up.

    `parts` maps the name that each has in the checkpoint, beside this layer, to its output size.
    """

    def __init__(self, ctx: LayerContext, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(ctx, in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, TensorTarget]]:
        parent = prefix.rpartition(".")[0]
        for name, parameter in self.named_parameters(recurse=False):
            start = 0
            for part, rows in self.parts.items():
                shape = (rows, *parameter.shape[1:])
                yield f"{parent}.{part}.{name}", TensorTarget(self, name, shape, start)
                start += rows

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts' outputs, as views of this layer's output [T,N]."""
        return torch.split(x, list(self.parts.values()), dim=-1)
