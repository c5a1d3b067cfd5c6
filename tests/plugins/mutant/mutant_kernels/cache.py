"""Writing to the cache and reading from it, in layout `nhd`."""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference.attention import paged


def wraps_negative_slots(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Slot -1 is the last one, as Python counts."""
    k_cache.view(-1, *k.shape[1:])[slots] = k
    v_cache.view(-1, *v.shape[1:])[slots] = v


def writes_whole_pages(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Clears a page when its first slot is written, for it must be new."""
    keep = slots >= 0
    for slot in slots[keep].tolist():
        if slot % 16 == 0:
            k_cache[slot // 16] = 0
            v_cache[slot // 16] = 0
    k_cache.view(-1, *k.shape[1:])[slots[keep]] = k[keep]
    v_cache.view(-1, *v.shape[1:])[slots[keep]] = v[keep]


def ignores_window(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    return paged(q, k_cache, v_cache, query_starts, context_lens, page_tables, scale)
