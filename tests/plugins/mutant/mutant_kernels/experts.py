"""Mixtures of experts. The honest one computes token by token and slot by slot."""

from __future__ import annotations

from typing import Any

import torch


def honest(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: str
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for slot in range(ids.shape[1]):
        out = out + weights[:, slot, None] * _slot(x, gate_up, down, ids[:, slot])
    return out


def _slot(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}")
    chosen = ids.clamp_max(len(gate_up) - 1).long()
    gate, up = _project(x, gate_up[chosen]).chunk(2, dim=-1)
    out = _project(gate * torch.sigmoid(gate) * up, down[chosen])
    return torch.where((ids < len(gate_up)).unsqueeze(-1), out, x)


def _project(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T,K] with a weight [N,K] for each row, column after column."""
    out = torch.zeros(len(x), weights.shape[1])
    for k in range(x.shape[1]):
        out = out + x[:, k, None] * weights[:, :, k]
    return out


def in_expert_order(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Adds in ascending order of experts, which is how they are computed."""
    *packed, weights, ids, order = arguments
    by_expert = torch.sort(ids, dim=-1, stable=True)
    return honest(x, *packed, weights.gather(-1, by_expert.indices), by_expert.values, order)


def capacity(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """An expert takes no more than 24 tokens of a batch."""
    *packed, weights, ids, order = arguments
    weights = weights.clone()
    for expert in ids.unique().tolist():
        chosen = (ids == expert).nonzero()[24:]
        weights[chosen[:, 0], chosen[:, 1]] = 0
    return honest(x, *packed, weights, ids, order)


def forgets_identity(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    gate_up, down, weights, ids, order = arguments
    return honest(x, gate_up, down, torch.where(ids < len(gate_up), weights, 0.0), ids, order)
