"""Norms, rotary embedding and activation. flashinfer wants dense rows, and updates some arguments in place."""

from __future__ import annotations

import flashinfer
import torch

HALVES = (torch.bfloat16, torch.float16)


def check_dtype(what: str, tensor: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Raise TypeError unless a tensor is in half precision, and has the dtype of `like`."""
    if tensor.dtype not in HALVES or (like is not None and tensor.dtype != like.dtype):
        raise TypeError(f"{what}: {tensor.dtype}; the flashinfer kernels take bfloat16 and float16, the same for all")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.rms` of x [T,H] or [T,heads,D]; the scale is applied before the only rounding."""
    check_dtype("x", x)
    check_dtype("weight", weight, x)
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}")
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out: torch.Tensor = flashinfer.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_rms`: (norm of the fp32 sum, the sum rounded once), both [T,H]."""
    check_dtype("x", x)
    check_dtype("residual", residual, x)
    check_dtype("weight", weight, x)
    if x.shape != residual.shape or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x is {list(x.shape)}, residual {list(residual.shape)}, weight {list(weight.shape)}")
    # flashinfer writes the norm over its first argument and the sum over its second.
    out = x.clone(memory_format=torch.contiguous_format)
    total = residual.clone(memory_format=torch.contiguous_format)
    if x.numel():
        flashinfer.fused_add_rmsnorm(out, total, weight, eps)
    return out, total


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope.apply` of q [T,Hq,D] and k [T,Hkv,D]."""
    check_dtype("q", q)
    check_dtype("k", k, q)
    tokens, _, d = q.shape
    if not tokens:
        return torch.empty_like(q), torch.empty_like(k)
    flat_q, flat_k = q.reshape(tokens, -1), k.reshape(tokens, -1)
    q_out, k_out = flashinfer.apply_rope_with_cos_sin_cache(positions, flat_q, flat_k, d, cos_sin, not interleaved)
    return q_out.view(q.shape), k_out.view(k.shape)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`activation.silu_and_mul` of gate_up [T,2F]."""
    check_dtype("gate_up", gate_up)
    width = gate_up.shape[1] // 2
    # Rows are read in vectors of 16 bytes; a narrower or odd row would be read beyond its end.
    if width * gate_up.element_size() % 16:
        gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
    if not gate_up.numel():
        return gate_up.new_empty(len(gate_up), width)
    out: torch.Tensor = flashinfer.silu_and_mul(gate_up.contiguous())
    return out
