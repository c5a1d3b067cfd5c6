"""The choice of positions, and attention over it."""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference.sparse import attention, index_topk


def last_of_equals(scores: torch.Tensor, positions: torch.Tensor, top_k: int) -> torch.Tensor:
    """Equal scores go to the highest position."""
    seen = torch.arange(scores.shape[1]) <= positions.unsqueeze(-1)
    turned = scores.where(seen, -torch.inf).flip(-1)
    chosen = scores.shape[1] - 1 - index_topk(turned, torch.full_like(positions, scores.shape[1] - 1), top_k)
    return chosen.where((chosen <= positions.unsqueeze(-1)) & (chosen < scores.shape[1]), -1).to(torch.int32)


def by_slot(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    latent_dim: int,
    order: str,
) -> torch.Tensor:
    """Ascending, but where the entries lie in the cache."""
    if q.dtype != torch.float32 or order != "sorted":
        raise TypeError(f"q is {q.dtype}, order {order}")
    ordered = indices.clone()
    for b, (begin, end) in enumerate(zip(query_starts.tolist(), query_starts[1:].tolist(), strict=False)):
        for row in range(begin, end):
            chosen = indices[row][indices[row] >= 0]
            slots = page_tables[b][chosen.long() // 16] * 16 + chosen % 16
            ordered[row, : len(chosen)] = chosen[slots.argsort()]
    return attention(q, cache, ordered, query_starts, context_lens, page_tables, scale, latent_dim, "selection")
