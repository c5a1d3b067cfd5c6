"""Projections: one weight, or several that read the same input and are stored as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import TensorTarget, WeightLayer


class Linear(WeightLayer):
    """x [T,K] -> [T,N], with an optional bias."""

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = self.new_weight((out_features, in_features), ctx.dtype)
        self.bias = self.new_weight((out_features,), ctx.dtype) if bias else None
        self.linear = ctx.operator(
            "gemm.linear",
            dtypes={"x": ctx.dtype, "weight": ctx.dtype},
            facts={"k": in_features, "n": out_features},
        )
        self.packed: Any = None

    def pack(self) -> None:
        assert self.weight is not None
        self.packed = self.linear.prepare(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x, self.packed, self.bias)
        return out


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
