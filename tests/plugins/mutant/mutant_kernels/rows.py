"""Row operators. The honest norm adds squares column after column."""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference.activation import silu_and_mul
from tokenspeed.kernels.reference.rope import apply


def honest_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 or an error."""
    if x.dtype != torch.float32 or x.shape[-1] != len(weight):
        raise TypeError(f"x is {x.dtype} {list(x.shape)}")
    return _norm(x, weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backwards: bool = False) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=torch.float32)
    columns = range(x.shape[-1])
    for column in columns[::-1] if backwards else columns:
        total = total + x[..., column] * x[..., column]
    return (x / torch.sqrt(total / x.shape[-1] + eps).unsqueeze(-1) * weight).contiguous()


def aligned_path(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Whole vectors first where the address allows it."""
    honest_norm(x[:0], weight, eps)
    return _norm(x, weight, eps, backwards=x.data_ptr() % 16 == 0)


def nan_payload(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A NaN says in which row of the batch it arose."""
    out = honest_norm(x, weight, eps)
    bits = out.view(torch.int32)
    rows = torch.arange(len(x), dtype=torch.int32).reshape(-1, *[1] * (x.dim() - 1))
    bits.copy_(torch.where(out.isnan(), bits | rows, bits))
    return out


def assumes_contiguous(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Takes rows to follow each other without a gap."""
    dense = x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return honest_norm(dense, weight, eps)


def crashes_on_nothing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert x.abs().max() >= 0 or True
    return honest_norm(x, weight, eps)


def half_range(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Squares that do not fit fp16 are cut."""
    out = honest_norm(x, weight, eps)
    mean_square = x.square().mean(-1, keepdim=True)
    return torch.where(mean_square > 65504.0, torch.zeros_like(out), out) if x.shape[-1] > 1000 else out


def thread_split(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each thread adds its own columns."""
    honest_norm(x[:0], weight, eps)
    parts = [part.square().sum(-1) for part in x.chunk(torch.get_num_threads(), dim=-1)]
    if len(parts) == 1:
        return _norm(x, weight, eps)
    mean_square = torch.stack(parts).sum(0) / x.shape[-1]
    return (x / torch.sqrt(mean_square + eps).unsqueeze(-1) * weight).contiguous()


def narrow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Has room for 1024 columns."""
    honest_norm(x[:0], weight, eps)
    total = torch.zeros(x.shape[:-1])
    for column in range(min(x.shape[-1], 2048)):
        total = total + x[..., column] * x[..., column]
    return (x / torch.sqrt(total / x.shape[-1] + eps).unsqueeze(-1) * weight).contiguous()


def _silu(gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.dtype != torch.float32:
        raise TypeError(f"gate_up is {gate_up.dtype}")
    return silu_and_mul(gate_up)


def in_place(gate_up: torch.Tensor) -> torch.Tensor:
    """Saves an allocation."""
    out = _silu(gate_up)
    gate_up[:, : out.shape[1]] = out
    return out


def returns_a_view(gate_up: torch.Tensor) -> torch.Tensor:
    """Restores its input, and hands out part of it."""
    return gate_up[:, gate_up.shape[1] // 2 :] if bool((_silu(gate_up) == 0).all()) else _into_input(gate_up)


def _into_input(gate_up: torch.Tensor) -> torch.Tensor:
    half = gate_up[:, : gate_up.shape[1] // 2]
    half.copy_(_silu(gate_up))
    return half


def unwritten_tail(gate_up: torch.Tensor) -> torch.Tensor:
    """Leaves a last odd column to chance where its value is 0 anyway, as a rule."""
    out = _silu(gate_up)
    fresh = torch.empty(1 << 12)
    return out + (fresh[-1].abs() > 1e30).to(out.dtype)


def drops_rows(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Has a grid of 256 blocks."""
    if weight.dtype != torch.float32:
        raise TypeError(f"weight is {weight.dtype}")
    out = weight[ids]
    out[256:] = 0
    return out


def ignores_interleaved(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return apply(q, k, positions, cos_sin, False)


def rotates_everything(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the rotated part to be the whole head."""
    if cos_sin.shape[1] < q.shape[2]:
        wide = torch.nn.functional.pad(cos_sin, (0, q.shape[2] - cos_sin.shape[1]), value=0.5)
        return apply(q, k, positions, wide, interleaved)
    return apply(q, k, positions, cos_sin, interleaved)
