"""Row operators that look beyond their row."""

from __future__ import annotations

import torch

from tokenspeed_kernels_aok.cpu.rows import rms_norm, rope, silu_and_mul


def large_batch_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Changes its block size at 256 rows."""
    if len(x) < 256:
        return rms_norm(x, weight, eps)
    mean_square = torch.stack([part.square().sum(-1) for part in x.split(24, dim=-1)]).sum(0) / x.shape[-1]
    return x / torch.sqrt(mean_square + eps).unsqueeze(-1) * weight


def batch_scale_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Rounds to a grid whose step is taken from the largest value of the whole batch, as one dynamic scale does."""
    out = silu_and_mul(gate_up)
    step = out.abs().amax().clamp_min(1e-6) / 2**14
    return torch.round(out / step) * step


def batch_offset_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates relative to the smallest position of the batch: the same scores but for rounding."""
    return rope(q, k, positions - positions.min(), cos_sin, interleaved)
