"""References of `gemm.linear` and `gemm.batched`."""

from __future__ import annotations

import torch

_ROWS = 1024
"""Rows of the weight that are widened at a time, so that a vocabulary-sized weight needs no copy of its own size."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T,K] times the transpose of weight [N,K], plus bias [N], in fp32; one rounding to x's dtype: [T,N]."""
    wide_x = x.to(torch.float32)
    out = torch.cat([wide_x @ rows.to(torch.float32).T for rows in torch.split(weight, _ROWS)], dim=-1)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(x.dtype)


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """For each group g: x[:, g] times the transpose of weight[g]; x [T,G,K], weight [G,N,K], in fp32: [T,G,N]."""
    out = torch.einsum("tgk,gnk->tgn", x.to(torch.float32), weight.to(torch.float32))
    return out.contiguous().to(x.dtype)
