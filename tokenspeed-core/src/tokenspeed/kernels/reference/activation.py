"""Reference of `activation.silu_and_mul`."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T,2F], in fp32 with one rounding: [T,F]."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
