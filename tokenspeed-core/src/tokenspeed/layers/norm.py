"""RMSNorm, alone and at the boundary of a residual block, and LayerNorm."""

from __future__ import annotations

import torch

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import WeightLayer


class RMSNorm(WeightLayer):
    """Root-mean-square norm over the last axis; the scale multiplies what was rounded to the model's dtype."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.new_weight((size,), ctx.dtype)
        self.dtypes = {"x": ctx.dtype, "weight": ctx.dtype}
        self.rms = ctx.operator("norm.rms", dtypes=self.dtypes, facts={"hidden": size})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rms(x, self.weight.data, self.eps)
        return out


class LayerNorm(WeightLayer):
    """(x - mean) / standard deviation over the last axis, times `weight`, plus `bias`."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.new_weight((size,), ctx.dtype)
        self.bias = self.new_weight((size,), ctx.dtype)
        dtypes = {"x": ctx.dtype, "weight": ctx.dtype}
        self.norm = ctx.operator("norm.layer", dtypes=dtypes, facts={"hidden": size})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        out: torch.Tensor = self.norm(x, self.weight.data, self.bias.data, self.eps)
        return out


class ScaledRMSNorm(RMSNorm):
    """A norm whose output is multiplied by a constant, which is folded into its weight (rounded) at load."""

    def __init__(self, ctx: LayerContext, size: int, eps: float, scale: float) -> None:
        super().__init__(ctx, size, eps)
        self.scale = scale

    def pack(self) -> None:
        self.weight.data.mul_(self.scale)


class ResidualRMSNorm(RMSNorm):
    """Adds a block's output to the residual stream and normalises the sum.

    The switch `layer_boundary_norm` decides how: `unfused` materialises `x + residual` in the model's dtype and
    normalises that, as training frameworks do; `fused` is one kernel, which normalises the unrounded sum.
    """

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        super().__init__(ctx, size, eps)
        fused = ctx.switches.get("layer_boundary_norm", "fused") == "fused"
        self.add_rms = ctx.operator("norm.add_rms", dtypes=self.dtypes, facts={"hidden": size}) if fused else None

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), each [T,H]; without a residual (the first block) x is the sum."""
        if residual is None:
            return self(x), x
        if self.add_rms is not None:
            out, total = self.add_rms(x, residual, self.weight.data, self.eps)
            return out, total
        total = x + residual
        return self(total), total
