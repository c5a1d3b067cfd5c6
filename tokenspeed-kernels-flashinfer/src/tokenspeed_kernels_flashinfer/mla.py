"""`attention.mla_paged` over compressed entries, by flashinfer's wrapper in the absorbed form.

A plan belongs to one batch and is made for each call, as in attention.py.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import flashinfer.mla
import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_flashinfer.pages import ragged_pages, workspace
from tokenspeed_kernels_flashinfer.rows import check_dtype


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    latent_dim: int,
) -> torch.Tensor:
    """Causal attention of q [T,Hq,C] over entries that all heads share: [T,Hq,R]; rows of no sequence are zero."""
    check_dtype("q", q)
    check_dtype("cache", cache, q)
    tokens, num_heads, width = q.shape
    out = torch.zeros(tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    rows = int(query_starts[-1])
    if not rows:
        return out
    page_starts, pages = ragged_pages(context_lens, page_tables)
    metadata = flashinfer.mla.MLAPlanMetadata.csr(query_starts, page_starts, pages, context_lens)
    wrapper: Any = flashinfer.BatchMLAPagedAttentionWrapper(workspace(q.device))
    wrapper.plan(
        metadata=metadata,
        num_heads=num_heads,
        head_dim_ckv=latent_dim,
        head_dim_kpe=width - latent_dim,
        page_size=PAGE_SIZE,
        causal=True,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=cache.dtype,
    )
    out[:rows] = wrapper.run(query=q[:rows].contiguous(), kv_cache=cache.squeeze(2))
    return out
