"""Reference of `gemm.linear`."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T,K] times the transpose of weight [N,K], plus bias [N], in fp32; one rounding to x's dtype: [T,N]."""
    wide_bias = None if bias is None else bias.to(torch.float32)
    return torch.nn.functional.linear(x.to(torch.float32), weight.to(torch.float32), wide_bias).to(x.dtype)
