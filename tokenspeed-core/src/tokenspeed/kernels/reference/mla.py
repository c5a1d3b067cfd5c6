"""References of `cache.write_latent` and `attention.mla_paged`."""

from __future__ import annotations

import torch

from tokenspeed.kernels.operators import PAGE_SIZE


def write_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latent [T,C] in the slots (int64[T]) of the cache [P,16,1,C]; negative slots are skipped."""
    wanted = slots >= 0
    cache[slots[wanted] // PAGE_SIZE, slots[wanted] % PAGE_SIZE, 0] = latent[wanted].to(cache.dtype)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    latent_dim: int,
) -> torch.Tensor:
    """Attention of each sequence's queries (q [T,Hq,C]) over its entries, in fp32 with one rounding: [T,Hq,R]."""
    out = q.new_zeros(*q.shape[:2], latent_dim)
    starts = query_starts.tolist()
    for b, length in enumerate(context_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        pages = page_tables[b, : -(-length // PAGE_SIZE)].long()
        keys = cache[pages].flatten(0, 2)[:length].to(torch.float32)
        scores = torch.einsum("nhc,lc->hnl", q[rows].to(torch.float32), keys) * scale
        count = scores.shape[1]
        query_at = torch.arange(length - count, length, device=q.device).unsqueeze(-1)
        unseen = torch.arange(length, device=q.device) > query_at
        weights = torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1)
        out[rows] = torch.einsum("hnl,lr->nhr", weights, keys[:, :latent_dim]).to(q.dtype)
    return out
