"""References of `norm.rms` and `norm.add_rms` (Llama's order, x/rms rounded to the model's dtype before the scale), and
of `norm.layer`."""

from __future__ import annotations

import torch


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x over its last axis, in x's dtype and shape, contiguous."""
    return _normalise(x.to(torch.float32), weight, eps, x.dtype)


def add_rms(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the unrounded fp32 sum of x and residual, the sum rounded once), both [T,H] in x's dtype."""
    total = x.to(torch.float32) + residual.to(torch.float32)
    return _normalise(total, weight, eps, x.dtype), total.to(x.dtype)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm of x [T,H] over its last axis, in fp32 with one rounding."""
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normal * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    mean_square = x.square().mean(-1, keepdim=True)
    return (weight * (x * torch.rsqrt(mean_square + eps)).to(dtype)).contiguous()
