"""Reference of `embedding.lookup`."""

from __future__ import annotations

import torch


def lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows `ids` (int64[T]) of `weight` ([V,H]): [T,H]."""
    return weight[ids]
