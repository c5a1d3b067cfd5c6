"""`attention.paged` over caches in layout `nhd`, by flashinfer's wrapper for ragged prefill, which decodes as well.

A plan belongs to one batch. It is made for each call: a plan that is kept and taken for another batch of the same
addresses would be silently wrong.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flashinfer
import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_flashinfer.pages import ragged_pages, workspace
from tokenspeed_kernels_flashinfer.rows import check_dtype


def paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
    *,
    unsplit: bool = False,
) -> torch.Tensor:
    """Causal attention of q [T,Hq,D]: [T,Hq,D]; rows past query_starts[-1] are zero. Keys may be split."""
    check_dtype("q", q)
    check_dtype("k_cache", k_cache, q)
    _, num_heads, head_dim = q.shape
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rows = int(query_starts[-1])
    if not rows:
        return out
    page_starts, pages = ragged_pages(context_lens, page_tables)
    wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD")
    wrapper.plan(
        query_starts,
        page_starts,
        pages,
        (context_lens - 1) % PAGE_SIZE + 1,
        num_heads,
        k_cache.shape[2],
        head_dim,
        PAGE_SIZE,
        causal=True,
        sm_scale=scale,
        # flashinfer counts the keys before a query, the operator counts the query itself, too.
        window_left=window - 1 if window else -1,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
        disable_split_kv=unsplit,
    )
    out[:rows] = wrapper.run(q[:rows].contiguous(), (k_cache, v_cache))
    return out


paged_unsplit = partial(paged, unsplit=True)
"""The same with the keys of a row in one piece, however few rows there are."""
