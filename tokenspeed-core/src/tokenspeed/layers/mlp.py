"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the checkpoint names are `gate_proj`, `up_proj`, `down_proj`."""

    def __init__(self, ctx: LayerContext, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(ctx, hidden_size, parts, bias=bias)
        self.silu_and_mul = ctx.operator("activation.silu_and_mul", dtypes={"x": ctx.dtype})
        self.down_proj = Linear(ctx, intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        out: torch.Tensor = self.down_proj(self.silu_and_mul(self.gate_up_proj(x)))
        return out
