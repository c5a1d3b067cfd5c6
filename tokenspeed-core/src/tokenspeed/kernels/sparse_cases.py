"""Measured calls of sparse attention: the scores of the indexer, the choice, and decoding over it, in large sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tokenspeed.kernels.case import Case, calling, need, running
from tokenspeed.kernels.operators import PAGE_SIZE

INDEX_HEADS, INDEX_WIDTH, TOP_K = 64, 128, 2048
HEADS, LATENT, ROTATED = 16, 512, 64
"""A share of the heads of the large model."""

CONTEXTS = (4096, 16384)
MOST_CACHE_BYTES = 256 << 20


def scoring(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """One query for each of `rows` sequences; torch gathers pages and multiplies."""
    for context, batch, tables, cache in _contexts(rows, INDEX_WIDTH, dtype):
        q = torch.randn(batch, INDEX_HEADS, INDEX_WIDTH).to(dtype)
        weights = torch.randn(batch, INDEX_HEADS)
        yield Case(
            need("attention.index_scores", dtype, "x", "kv", index_heads=INDEX_HEADS, width=INDEX_WIDTH),
            f"decode heads={INDEX_HEADS} C={INDEX_WIDTH} context={context} B={batch}",
            running(q, weights, cache, *_decode(batch, context), tables, INDEX_WIDTH**-0.5),
            calling(_gather_then_score, q, weights, cache, tables.long()),
            read_bytes=cache.nbytes,
            flops=2 * batch * INDEX_HEADS * context * INDEX_WIDTH,
            memory=[cache],
        )


def choosing(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """The best positions of `rows` queries, whose scores are fp32 whatever the dtype."""
    del dtype
    for context in CONTEXTS:
        for m in rows:
            scores, positions = torch.randn(m, context), torch.full((m,), context - 1)
            yield Case(
                need("attention.index_topk", torch.float32, top_k=TOP_K),
                f"k={TOP_K} L={context} T={m}",
                running(scores, positions, TOP_K),
                calling(torch.topk, scores, TOP_K),
                read_bytes=scores.nbytes,
            )


def sparse_decode(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """One query for each of `rows` sequences over random positions; torch gathers them, then attends."""
    width = LATENT + ROTATED
    for context, batch, tables, cache in _contexts(rows, width, dtype):
        q = torch.randn(batch, HEADS, width).to(dtype)
        indices = torch.stack([torch.randperm(context)[:TOP_K] for _ in range(batch)]).to(torch.int32)
        slots = tables.long().gather(1, indices.long() // PAGE_SIZE) * PAGE_SIZE + indices % PAGE_SIZE
        yield Case(
            need("attention.sparse_paged", dtype, "x", "kv", heads=HEADS, latent_dim=LATENT, width=width),
            f"decode heads={HEADS} R={LATENT} C={width} k={TOP_K} context={context} B={batch}",
            running(q, cache, indices, *_decode(batch, context), tables, width**-0.5, LATENT, "sorted"),
            calling(_gather_then_attend, q, cache, slots),
            read_bytes=batch * TOP_K * width * dtype.itemsize,
            flops=2 * batch * HEADS * TOP_K * (width + LATENT),
        )


def layer_norm(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """The norm of the indexer's keys."""
    weight, bias = torch.rand(2, INDEX_WIDTH).to(dtype).unbind()
    for m in rows:
        x = torch.randn(m, INDEX_WIDTH).to(dtype)
        yield Case(
            need("norm.layer", dtype, "x", "weight", hidden=INDEX_WIDTH),
            f"H={INDEX_WIDTH} T={m}",
            running(x, weight, bias, 1e-6),
            calling(F.layer_norm, x, weight.shape, weight, bias, 1e-6),
            read_bytes=2 * x.nbytes,
        )


def _contexts(
    rows: Sequence[int], width: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(context, batch, page tables int32[B,W], cache of random entries), as far as the cache is not too large."""
    for context in CONTEXTS:
        for batch in rows:
            if batch * context * width * dtype.itemsize <= MOST_CACHE_BYTES:
                pages = batch * context // PAGE_SIZE
                cache = torch.randn(pages, PAGE_SIZE, 1, width).to(dtype)
                yield context, batch, torch.randperm(pages, dtype=torch.int32).view(batch, -1), cache


def _decode(batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """query_starts and context_lens of one query for each sequence."""
    return torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), context, dtype=torch.int32)


def _gather_then_score(q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor) -> object:
    keys = cache[tables].flatten(1, 3)  # [B,context,C]
    products = torch.relu(q @ keys.transpose(1, 2)).float() * INDEX_WIDTH**-0.5
    return torch.einsum("bhl,bh->bl", products, weights)


def _gather_then_attend(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> object:
    keys = cache.view(-1, cache.shape[-1])[slots].unsqueeze(1)  # [B,1,k,C]
    return F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys[..., :LATENT])
