"""Measured calls of `cache.write` and `attention.paged`, in the head shape of Qwen3-0.6B.

The caches hold random numbers in no particular layout: they are as good in one kernel's as in another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tokenspeed import huge_pages
from tokenspeed.kernels.case import COLD_BYTES, HEAD_DIM, HEADS, KV_HEADS, Call, Case, calling, need, running
from tokenspeed.kernels.operators import PAGE_SIZE

DECODE_CONTEXTS = (128, 512, 2048, 8192)
PREFILL_LENGTHS = (128, 512, 2048)

MOST_CACHE_BYTES = 768 << 20
"""Larger decode batches are left out."""


def writing(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """Keys and values of `rows` tokens into scattered slots; torch stores them by index."""
    k_cache, v_cache = _caches(4096 // PAGE_SIZE, dtype)

    def plain(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        k_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = k
        v_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = v

    for m in rows:
        k, v = torch.randn(2, m, KV_HEADS, HEAD_DIM).to(dtype).unbind()
        slots = torch.randperm(4096)[:m]
        yield Case(
            need("cache.write", dtype, "x", "kv", head_dim=HEAD_DIM),
            f"heads={KV_HEADS} D={HEAD_DIM} T={m}",
            running(k, v, k_cache, v_cache, slots),
            calling(plain, k, v, slots),
            read_bytes=4 * k.nbytes,
        )


def decode_and_prefill(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """One query for each of `rows` sequences, then whole prompts.

    torch's yardsticks have contiguous keys and values and are its fastest forms: for decoding the queries of a group as
    rows of one head, for prefill `is_causal` with `enable_gqa`.
    """
    for context in DECODE_CONTEXTS:
        for batch in rows:
            if 2 * batch * context * KV_HEADS * HEAD_DIM * dtype.itemsize <= MOST_CACHE_BYTES:
                yield _decode(batch, context, dtype)
    for length in PREFILL_LENGTHS:
        yield _prefill(length, dtype)


def _decode(batch: int, context: int, dtype: torch.dtype) -> Case:
    q = torch.randn(batch, HEADS, HEAD_DIM).to(dtype)
    k_cache, v_cache = _caches(batch * context // PAGE_SIZE, dtype)
    k, v = (cache.view(batch, context, KV_HEADS, HEAD_DIM).transpose(1, 2) for cache in (k_cache, v_cache))
    kv_bytes = k_cache.nbytes + v_cache.nbytes
    return _case(
        f"decode B={batch} context={context}",
        q,
        (k_cache, v_cache),
        queries=[1] * batch,
        context=context,
        yardstick=calling(
            F.scaled_dot_product_attention,
            q.view(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM),
            huge_pages.copied(k),
            huge_pages.copied(v),
        ),
        read_bytes=kv_bytes,
        pairs=batch * context,
        memory=(k_cache, v_cache) if kv_bytes >= COLD_BYTES // 2 else (),
    )


def _prefill(length: int, dtype: torch.dtype) -> Case:
    q, k, v = (torch.randn(length, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k_cache, v_cache = _caches(length // PAGE_SIZE, dtype)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return _case(
        f"prefill T={length}",
        q,
        (k_cache, v_cache),
        queries=[length],
        context=length,
        yardstick=lambda _: F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True),
        read_bytes=k_cache.nbytes + v_cache.nbytes,
        pairs=length * (length + 1) // 2,
    )


def _case(
    shape: str,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    *,
    queries: list[int],
    context: int,
    yardstick: Call,
    read_bytes: int,
    pairs: int,
    memory: Sequence[torch.Tensor] = (),
) -> Case:
    """`queries[b]` queries of sequences of `context` tokens in scattered pages; `pairs` of a query and a key meet."""
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    lengths = torch.full((len(queries),), context, dtype=torch.int32)
    tables = torch.randperm(len(caches[0])).to(torch.int32).view(len(queries), -1)
    return Case(
        need("attention.paged", q.dtype, "x", "kv", head_dim=HEAD_DIM, group_size=HEADS // KV_HEADS),
        shape,
        running(q, *caches, starts, lengths, tables, HEAD_DIM**-0.5),
        yardstick,
        read_bytes=read_bytes,
        flops=4 * pairs * HEADS * HEAD_DIM,
        memory=memory,
    )


def _caches(pages: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k_cache, v_cache = (huge_pages.zeros(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype).normal_() for _ in range(2))
    return k_cache, v_cache
