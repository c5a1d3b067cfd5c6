"""`attention.paged`: decode rows and prefill chunks by one compiled kernel, so a row's bits are the same in both.

The order, for one query row and head, over caches of layout `nhd`:

1. Keys are cut into splits of 256 counted from position 0, wherever their pages lie.
2. Inside a split, blocks of keys in ascending order: scores by the matrix unit over the head's features, times
   scale * log2(e) in fp32; running maximum m; p = exp2(score - m), exactly 0 for a masked key; l = l * alpha plus the
   fixed tree over the block's p; o = o * alpha plus p (rounded to the cache's dtype) times v by the matrix unit.
3. Splits fold in ascending order into (M, L, O): both sides are scaled to the new maximum and added.
4. O / L with IEEE division, plus +0 (so that no sign of a zero depends on how the work was cut), one rounding.

Where many tiles keep the GPU busy a program walks all splits of its tile. Where few do (one long decode), programs take
one split each and a second kernel folds what they stored: folding into the empty state (-inf, 0, 0) changes nothing, so
both ways give the same bits and the choice is free. A block or split that is masked for a row leaves its state as it
was, so it does not matter how many of them the row's tile walks: alpha is 1, p is 0, and a matrix unit that adds zeros
to an accumulator which it produced returns it.

Rows of a tile are (token, head of the group) pairs; prefill and decode use the same tile, padded, since the matrix
instruction and the layout of a row must not differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.spec import Need
from tokenspeed_kernels_aok.triton.arith import dot, narrow, tree_sum
from tokenspeed_kernels_aok.triton.cache import cache_strides
from tokenspeed_kernels_aok.triton.launch import (
    INTERPRETED,
    TRITON_DTYPES,
    Form,
    arch_of,
    check_dtypes,
    launch,
    multiprocessors,
)
from tokenspeed_kernels_aok.triton.tiles import AttentionTile, attention_tile

# Sequences whose starts are read at once when a program looks up its own.
_SCAN = 128

# Splits whose partial results the folding kernel loads ahead.
_AHEAD = 8

# Largest store of partial results; a call that would need more walks all splits in one program.
_MAX_PARTIAL_BYTES = 64 << 20


@triton.jit
def _sequence_of(index, query_starts, sequences, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    """Last sequence b with query_starts[b] // TOKENS + b <= index (TOKENS > 1), or query_starts[b] <= index (1)."""
    count = 0
    for first in range(0, sequences, SCAN):
        b = first + tl.arange(0, SCAN)
        start = tl.load(query_starts + b, mask=b < sequences, other=0)
        if TOKENS > 0:
            start = start // TOKENS + b
        count += tl.sum(((b < sequences) & (start <= index)).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _fold(top, mass, total, new_top, new_mass, new_total):
    """The state (M, L, O) after a split's (m, l, o); rows may be scalars with a vector total, or vectors with tiles."""
    both = tl.maximum(top, new_top)
    base = tl.where(both == float("-inf"), 0.0, both)
    keep = tl.math.exp2(top - base)
    take = tl.math.exp2(new_top - base)
    mass = mass * keep + new_mass * take
    if len(total.shape) == 2:
        total = total * keep[:, None] + new_total * take[:, None]
    else:
        total = total * keep + new_total * take
    return both, mass, total


@triton.jit
def _finish(mass, total):
    """O / L + 0; rows that saw no key (none of a valid call) give 0."""
    safe = tl.where(mass == 0.0, 1.0, mass)
    if len(total.shape) == 2:
        safe = tl.broadcast_to(safe[:, None], total.shape)
    else:
        safe = tl.full(total.shape, 0.0, tl.float32) + safe
    return tl.math.div_rn(total, safe) + 0.0


@triton.jit(do_not_specialize=["sequences", "window", "whole", "table_row", "partial_rows"])
def attend_kernel(
    q,
    k_cache,
    v_cache,
    query_starts,
    context_lens,
    page_tables,
    out,
    partial_total,
    partial_state,
    sequences,
    scale,
    window,
    whole,
    q_token,
    q_head,
    cache_page,
    cache_slot,
    cache_head,
    table_row,
    partial_rows,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    SCAN: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One query tile (axis 0) of one kv head (axis 1): all splits if `whole`, else the split of axis 2."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(tile, query_starts, sequences, TOKENS, SCAN)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    first = (tile - (start // TOKENS + sequence)) * TOKENS
    if first >= count:
        return
    offset = tl.load(context_lens + sequence) - count
    keys_end = offset + tl.minimum(first + TOKENS, count)
    keys_start = 0
    if window > 0:
        keys_start = tl.maximum(offset + first - window + 1, 0)
    split_start = keys_start // SPLIT
    split_end = tl.cdiv(keys_end, SPLIT)
    if whole == 0:
        split = tl.program_id(2)
        if (split < split_start) | (split >= split_end):
            return
        split_start = split
        split_end = split + 1

    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < count)
    position = offset + token
    oldest = tl.where(window > 0, position - window, -1)
    feature = tl.arange(0, BLOCK_D)
    held = feature < D
    q_at = (start + token).to(tl.int64) * q_token + head * q_head
    queries = tl.load(q + q_at[:, None] + feature[None, :], mask=live[:, None] & held[None, :], other=0.0)
    pages = page_tables + sequence.to(tl.int64) * table_row
    kv_at = kv_head * cache_head

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(split_start, split_end):
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for block in tl.range(split * SPLIT, tl.minimum((split + 1) * SPLIT, keys_end), BLOCK_N, num_stages=STAGES):
            key = block + tl.arange(0, BLOCK_N)
            written = key < keys_end
            page = tl.load(pages + key // PAGE, mask=written, other=0).to(tl.int64)
            slot_at = page * cache_page + (key % PAGE) * cache_slot + kv_at
            kv_offsets = slot_at[:, None] + feature[None, :]
            kv_mask = written[:, None] & held[None, :]
            keys = tl.load(k_cache + kv_offsets, mask=kv_mask, other=0.0)
            scores = dot(queries, keys.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), EMULATE) * scale
            visible = (key[None, :] <= position[:, None]) & (key[None, :] > oldest[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            new_m = tl.maximum(m, tl.max(scores, axis=1))
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
            p = tl.math.exp2(scores - base[:, None])
            alpha = tl.math.exp2(m - base)
            l = l * alpha + tree_sum(p)  # noqa: E741
            values = tl.load(v_cache + kv_offsets, mask=kv_mask, other=0.0)
            o = dot(narrow(p, values.dtype, EMULATE), values, o * alpha[:, None], EMULATE)
            m = new_m
        top, mass, total = _fold(top, mass, total, m, l, o)

    out_row = (start + token).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    if whole != 0:
        result = narrow(_finish(mass, total), out.dtype.element_ty, EMULATE)
        tl.store(out + out_row[:, None] * D + feature[None, :], result, mask=live[:, None] & held[None, :])
    else:
        partial_row = partial_rows.to(tl.int64) * split_start + out_row
        tl.store(partial_total + partial_row[:, None] * BLOCK_D + feature[None, :], total, mask=live[:, None])
        tl.store(partial_state + 2 * partial_row, top, mask=live)
        tl.store(partial_state + 2 * partial_row + 1, mass, mask=live)


@triton.jit(do_not_specialize=["sequences", "window", "partial_rows"])
def fold_kernel(
    query_starts,
    context_lens,
    partial_total,
    partial_state,
    out,
    sequences,
    window,
    partial_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    SCAN: tl.constexpr,
    AHEAD: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Fold the stored splits of one token (axis 0) and head (axis 1), in ascending order."""
    token = tl.program_id(0)
    sequence = _sequence_of(token, query_starts, sequences, 0, SCAN)
    next_start = tl.load(query_starts + sequence + 1)
    if token >= next_start:
        return
    position = tl.load(context_lens + sequence) - next_start + token
    split_start = 0
    if window > 0:
        split_start = tl.maximum(position - window + 1, 0) // SPLIT
    split_end = position // SPLIT + 1
    feature = tl.arange(0, BLOCK_D)
    row = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)

    top = float("-inf")
    mass = 0.0
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(split_start, split_end, AHEAD):
        tops = ()
        masses = ()
        totals = ()
        for ahead in tl.static_range(AHEAD):
            there = first + ahead < split_end
            at = partial_rows.to(tl.int64) * (first + ahead) + row
            tops = tops + (tl.load(partial_state + 2 * at, mask=there, other=float("-inf")),)
            masses = masses + (tl.load(partial_state + 2 * at + 1, mask=there, other=0.0),)
            lanes = feature * 0 + (first + ahead) < split_end
            totals = totals + (tl.load(partial_total + at * BLOCK_D + feature, mask=lanes, other=0.0),)
        for ahead in tl.static_range(AHEAD):
            top, mass, total = _fold(top, mass, total, tops[ahead], masses[ahead], totals[ahead])
    result = narrow(_finish(mass, total), out.dtype.element_ty, EMULATE)
    tl.store(out + row * D + feature, result, mask=feature < D)


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
    """Causal attention of the ragged queries q [T,Hq,D] over their sequences' pages: [T,Hq,D], contiguous.

    Rows that belong to no sequence (past query_starts[-1]) are zero. Raises TypeError for dtypes that differ or are not
    declared, ValueError for caches of another head size and for more query heads on a kv head than a tile has rows.
    """
    check_dtypes(q=q, k_cache=k_cache, v_cache=v_cache)
    if not q.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1]:
        raise ValueError(f"q {list(q.shape)} does not fit caches {list(k_cache.shape)} and {list(v_cache.shape)}")
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    tile = attention_tile(arch_of(q.device), head_dim, k_cache.element_size())
    if q_heads // kv_heads > tile.block_m:
        raise ValueError(f"{q_heads} query heads on {kv_heads} kv heads; at most {tile.block_m} share one")
    query_tiles = tokens // (tile.block_m // (q_heads // kv_heads)) + len(context_lens)
    splits = triton.cdiv(page_tables.shape[1] * PAGE_SIZE, tile.split)
    row_bytes = 4 * (triton.next_power_of_2(head_dim) + 2)
    whole = (
        splits == 1
        or query_tiles * kv_heads >= multiprocessors(q.device)
        or splits * tokens * q_heads * row_bytes > _MAX_PARTIAL_BYTES
    )
    return paged_by(tile, whole, q, k_cache, v_cache, query_starts, context_lens, page_tables, scale, window)


def row_counts(need: Need, most: int) -> tuple[int, ...]:  # noqa: ARG001
    """One row leaves the GPU so idle that its splits are folded by a kernel of their own."""
    return (1,)


def paged_by(
    tile: AttentionTile,
    whole: bool,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """`paged` with the splits walked by one program (`whole`) or by one program each: the same bits."""
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    page_stride, slot_stride, head_stride, _ = cache_strides(k_cache, v_cache)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel() or not len(context_lens):
        return out
    constants, num_warps = _constants(tile, q_heads // kv_heads, head_dim)
    sequences, rows = len(context_lens), tokens * q_heads
    splits = 1 if whole else triton.cdiv(page_tables.shape[1] * PAGE_SIZE, tile.split)
    partial_total = partial_state = torch.empty(0, dtype=torch.float32, device=q.device)
    if not whole:
        partial_total = torch.empty(splits, rows, constants["BLOCK_D"], dtype=torch.float32, device=q.device)
        partial_state = torch.empty(splits, rows, 2, dtype=torch.float32, device=q.device)
    launch(
        attend_kernel,
        (tokens // (tile.block_m // constants["GROUP"]) + sequences, kv_heads, splits),
        q.device,
        q,
        k_cache,
        v_cache,
        query_starts,
        context_lens,
        page_tables,
        out,
        partial_total,
        partial_state,
        sequences,
        scale * math.log2(math.e),
        window,
        int(whole),
        q.stride(0),
        q.stride(1),
        page_stride,
        slot_stride,
        head_stride,
        page_tables.stride(0),
        rows,
        **constants,
        num_warps=num_warps,
        num_stages=tile.num_stages,
    )
    if not whole:
        launch(
            fold_kernel,
            (tokens, q_heads),
            q.device,
            query_starts,
            context_lens,
            partial_total,
            partial_state,
            out,
            sequences,
            window,
            rows,
            D=head_dim,
            BLOCK_D=constants["BLOCK_D"],
            SPLIT=tile.split,
            SCAN=_SCAN,
            AHEAD=_AHEAD,
            EMULATE=INTERPRETED,
            num_warps=1,
        )
    return out


def _constants(tile: AttentionTile, group: int, head_dim: int) -> tuple[dict[str, Any], int]:
    constants = {
        "GROUP": group,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SPLIT": tile.split,
        "PAGE": PAGE_SIZE,
        "SCAN": _SCAN,
        "STAGES": tile.num_stages,
        "EMULATE": INTERPRETED,
    }
    return constants, tile.num_warps


_CALL_SIZES = ("sequences", "window", "whole", "q_token", "q_head", "cache_page", "cache_slot", "cache_head")


def forms(target: str) -> Iterator[Form]:
    """Head sizes 64, 128 and 256 for each dtype, and the folding kernel."""
    for name, dtype in TRITON_DTYPES.items():
        itemsize = getattr(torch, name).itemsize
        for head_dim in (64, 128, 256):
            tile = attention_tile(target, head_dim, itemsize)
            constants, num_warps = _constants(tile, 4, head_dim)
            yield Form(
                name=f"attention.paged.{dtype}.{head_dim}",
                target=target,
                kernel=attend_kernel,
                signature=dict.fromkeys(("q", "k_cache", "v_cache"), f"*{dtype}")
                | dict.fromkeys(("query_starts", "context_lens", "page_tables"), "*i32")
                | {"out": f"*{dtype}", "partial_total": "*fp32", "partial_state": "*fp32"}
                | {"sequences": "i32", "scale": "fp32"}
                | dict.fromkeys((*_CALL_SIZES[1:], "table_row", "partial_rows"), "i32"),
                constants=constants | {"EMULATE": False},
                aligned=("q", "k_cache", "v_cache", "query_starts", "context_lens", "page_tables", "out")
                + ("partial_total", "partial_state", "q_token", "q_head", "cache_page", "cache_slot", "cache_head"),
                num_warps=num_warps,
                num_stages=tile.num_stages,
            )
        yield Form(
            name=f"attention.fold.{dtype}",
            target=target,
            kernel=fold_kernel,
            signature=dict.fromkeys(("query_starts", "context_lens"), "*i32")
            | {"partial_total": "*fp32", "partial_state": "*fp32", "out": f"*{dtype}"}
            | dict.fromkeys(("sequences", "window", "partial_rows"), "i32"),
            constants={"D": 128, "BLOCK_D": 128, "SPLIT": 256, "SCAN": _SCAN, "AHEAD": _AHEAD, "EMULATE": False},
            aligned=("query_starts", "context_lens", "partial_total", "partial_state", "out"),
            num_warps=1,
        )
