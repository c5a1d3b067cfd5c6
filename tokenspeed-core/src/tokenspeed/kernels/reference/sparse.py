"""References of sparse attention: `attention.index_scores`, `attention.index_topk` and `attention.sparse_paged`."""

from __future__ import annotations

import torch

from tokenspeed.kernels.operators import PAGE_SIZE

ORDERS = ("selection", "sorted")


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """fp32[T,16W]: for queries q [T,Hi,C] with weights fp32[T,Hi], the score of each position that they see."""
    scores = torch.full((len(q), PAGE_SIZE * page_tables.shape[1]), -torch.inf, device=q.device)
    starts = query_starts.tolist()
    for b, length in enumerate(context_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        keys = _entries(cache, page_tables[b], length)
        products = torch.einsum("nhc,lc->nhl", q[rows].to(torch.float32), keys) * scale
        found = torch.einsum("nhl,nh->nl", torch.relu(products), weights[rows])
        query_at = torch.arange(length - len(found), length, device=q.device).unsqueeze(-1)
        scores[rows, :length] = found.masked_fill(torch.arange(length, device=q.device) > query_at, -torch.inf)
    return scores


def index_topk(scores: torch.Tensor, positions: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32[T,k]: the positions of the k largest of scores [T,L] up to each row's position, best first, then -1."""
    rows, columns = scores.shape
    at = torch.arange(columns, device=scores.device)
    # What a query does not see comes behind what it sees, even where that is -infinity.
    seen = scores.where(at <= positions.unsqueeze(-1), -torch.inf)
    order = torch.sort(seen, dim=-1, descending=True, stable=True).indices[:, :top_k]
    indices = torch.full((rows, top_k), -1, dtype=torch.int32, device=scores.device)
    indices[:, : order.shape[1]] = order.where(order <= positions.unsqueeze(-1), -1)
    return indices


def attention(
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
    """Attention of each query (q [T,Hq,C]) over its selected entries, in fp32 with one rounding: [T,Hq,R].

    Raises ValueError for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}")
    out = q.new_zeros(*q.shape[:2], latent_dim)
    starts = query_starts.tolist()
    for b, length in enumerate(context_lens.tolist()):
        entries = _entries(cache, page_tables[b], length)
        for row in range(starts[b], starts[b + 1]):
            selected = indices[row][indices[row] >= 0].long()
            keys = entries[selected.sort().values if order == "sorted" else selected]
            weights = torch.softmax(q[row].to(torch.float32) @ keys.T * scale, dim=-1)
            out[row] = (weights @ keys[:, :latent_dim]).to(q.dtype)
    return out


def _entries(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` entries of a sequence in the order of their positions, fp32[length,C]."""
    return cache[table[: -(-length // PAGE_SIZE)].long()].flatten(0, 2)[:length].to(torch.float32)
