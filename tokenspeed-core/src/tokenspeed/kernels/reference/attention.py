"""Reference of `attention.paged` over caches in `nhd` layout: one sequence after another, all scores at once."""

from __future__ import annotations

import torch

from tokenspeed.kernels.operators import PAGE_SIZE


def paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of the ragged queries q [T,Hq,D] over their sequences' pages: [T,Hq,D] in q's dtype.

    Query i of sequence b stands at position context_lens[b] - n_b + i and sees the keys up to its own position, with a
    window only the last `window` of them. Rows that belong to no sequence (past query_starts[-1]) are zero.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for b, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        pages = page_tables[b, : -(-context_len // PAGE_SIZE)].long()
        keys = k_cache[pages].flatten(0, 1)[:context_len]
        values = v_cache[pages].flatten(0, 1)[:context_len]
        out[rows] = _attend(q[rows], keys, values, scale, window).to(q.dtype)
    return out


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """fp32 attention of the last n positions (q [n,Hq,D]) over all L of one sequence ([L,Hkv,D]): [n,Hq,D]."""
    n, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    wide_keys = keys.to(torch.float32).repeat_interleave(group, dim=1)
    wide_values = values.to(torch.float32).repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.to(torch.float32), wide_keys) * scale
    query_at = torch.arange(length - n, length, device=q.device).unsqueeze(-1)
    key_at = torch.arange(length, device=q.device)
    visible = key_at <= query_at
    if window > 0:
        visible &= key_at > query_at - window
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, wide_values)
