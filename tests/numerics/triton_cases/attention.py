"""`attention.paged`: agreement, decode = prefill, one program = many, rows alone = rows in a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from oracle import ieee
from ptx_emulator.arithmetic import exp2, from_bf16, to_bf16
from ptx_emulator.matrix import project
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.reference import attention as reference
from tokenspeed_kernels_aok.triton import attention
from tokenspeed_kernels_aok.triton.launch import arch_of
from tokenspeed_kernels_aok.triton.tiles import ATTENTION, AttentionTile, attention_tile
from triton_cases.support import (
    DEVICE,
    DTYPES,
    EMULATED,
    MODEL_SIZED,
    SIZES,
    THOROUGH,
    architectures,
    assert_agrees,
    dirty_memory,
    random,
    same_bits,
)


@dataclasses.dataclass
class Call:
    """One call over a cache whose slots past each context hold NaN, as a stranger's leftovers might."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    page_tables: torch.Tensor

    def run(self, window: int = 0, *, tile: AttentionTile | None = None, whole: bool = True) -> torch.Tensor:
        tile = tile or attention_tile(arch_of(DEVICE), self.q.shape[-1], self.q.element_size())
        return attention.paged_by(tile, whole, *self.arguments(), window)

    def arguments(self) -> tuple[Any, ...]:
        parts = (self.q, self.k_cache, self.v_cache, self.query_starts, self.context_lens, self.page_tables)
        return (*parts, self.q.shape[-1] ** -0.5)

    def only(self, rows: dict[int, int]) -> Call:
        """The last `rows[b]` queries of each sequence b that is named, in that order."""
        picked, starts = [], [0]
        for b, count in rows.items():
            end = int(self.query_starts[b + 1])
            picked.append(self.q[end - count : end])
            starts.append(starts[-1] + count)
        sequences = torch.tensor(list(rows), device=DEVICE)
        return dataclasses.replace(
            self,
            q=torch.cat(picked),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            context_lens=self.context_lens[sequences],
            page_tables=self.page_tables[sequences],
        )

    def upto(self, b: int, length: int, count: int) -> Call:
        """Queries length - count .. length - 1 of sequence b, as if its later tokens did not exist yet."""
        start = int(self.query_starts[b]) + length - count
        before = int(self.context_lens[b]) - int(self.query_starts[b + 1]) + int(self.query_starts[b])
        assert before == 0, "the sequence must be a whole prefill"
        return dataclasses.replace(
            self,
            q=self.q[start : start + count],
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor([length], dtype=torch.int32, device=DEVICE),
            page_tables=self.page_tables[b : b + 1],
        )


def make_call(
    lengths: list[int],
    counts: list[int],
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int, int] = (4, 2, 16),
) -> Call:
    """Sequences of `lengths` tokens of which the last `counts` are queries; pages in random order."""
    q_heads, kv_heads, head_dim = heads
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    shape = (sum(pages), PAGE_SIZE, kv_heads, head_dim)
    caches = [random(*shape, dtype=dtype, seed=seed) for seed in (1, 2)]
    page_tables = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
    used = 0
    for b, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        page_tables[b, :count] = order[used : used + count]
        used += count
        for pool in caches:
            pool[order[used - 1], length - PAGE_SIZE * (count - 1) :] = torch.nan
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Call(
        random(int(starts[-1]), q_heads, head_dim, dtype=dtype),
        *caches,
        starts.to(torch.int32).to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_tables.to(DEVICE),
    )


@pytest.mark.parametrize(("dtype", "window"), [*((dtype, 0) for dtype in DTYPES), (torch.bfloat16, 20)])
@pytest.mark.parametrize("head_dim", [24, *([128, 256] if MODEL_SIZED else [])])
def test_a_mixed_batch_agrees_with_the_reference(dtype: torch.dtype, window: int, head_dim: int) -> None:
    call = make_call([5, 300, 64, 513], [5, 1, 40, 2], dtype, heads=(3, 1, head_dim))
    expected = reference.paged(*call.arguments(), window)
    assert_agrees("attention.paged", call.run(window), expected)


def test_the_public_function_chooses_and_rows_of_no_sequence_are_zero() -> None:
    call = make_call([40, 300], [3, 1])
    padded = dataclasses.replace(call, q=torch.cat([call.q, torch.full_like(call.q[:2], 7)]))
    out = attention.paged(*padded.arguments())
    assert same_bits(out[:4], call.run())
    assert not out[4:].any()


@pytest.mark.parametrize("window", [0, 20, 270] if THOROUGH else [0, 270])
def test_one_program_for_all_splits_and_one_for_each_give_the_same_bits(window: int) -> None:
    call = make_call([5, 300, 513], [5, 1, 2])
    assert same_bits(call.run(window, whole=False), call.run(window))


@pytest.mark.parametrize("arch", architectures(ATTENTION))
@pytest.mark.parametrize("head_dim", [16, *([64, 128, 256] if MODEL_SIZED else [])])
def test_decode_is_prefill_and_chunks_are_the_whole(arch: str, head_dim: int) -> None:
    call = make_call([290], [290], heads=(2, 1, head_dim))
    tile = attention_tile(arch, head_dim, 2)
    prefill = call.run(tile=tile)
    assert torch.isfinite(prefill).all()
    for position in (0, 15, 16, 63, 64, 255, 256, 289) if THOROUGH or arch == arch_of(DEVICE) else (16, 256, 289):
        for whole in (True, False):
            decode = call.upto(0, position + 1, 1).run(tile=tile, whole=whole)
            assert same_bits(decode[0], prefill[position]), f"decode at {position} differs from prefill"
    for length, count in ((100, 100), (259, 59), (290, 31)):
        chunk = call.upto(0, length, count).run(tile=tile)
        assert same_bits(chunk, prefill[length - count : length]), f"chunk of {count} up to {length} differs"


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    lengths = [1 + 37 * b % 290 for b in range(33)] if THOROUGH else [270, 257, 256, *(1 + 2 * b for b in range(30))]
    call = make_call(lengths, [1] * len(lengths), heads=(2, 1, 16))
    batch = call.run()
    for size in SIZES[: SIZES.index(33)]:
        part = call.only(dict.fromkeys(range(size), 1)).run()
        assert same_bits(part, batch[:size]), f"the first {size} rows depend on the batch"
    long_neighbour = make_call([*lengths[:3], 700], [1, 1, 1, 90], heads=(2, 1, 16))
    alone = long_neighbour.only({1: 1}).run()
    assert same_bits(alone, long_neighbour.run()[1:2])


@pytest.mark.parametrize("whole", [True, False])
def test_rows_and_sequences_of_nobody_change_nothing_and_are_zero(whole: bool) -> None:
    """A decode step in a bucket: fewer rows than it has, page tables wider than needed, workspaces with anything."""
    call = make_call([300, 1, 40], [1, 1, 1], heads=(2, 1, 16))
    width = call.page_tables.shape[1]
    tables = torch.full((8, width + 9), 2**30, dtype=torch.int32, device=DEVICE)
    tables[:3, :width] = call.page_tables
    tables[3:] = 0
    padded = dataclasses.replace(
        call,
        q=torch.cat([call.q, torch.full_like(call.q[:1], torch.nan).expand(5, -1, -1)]),
        query_starts=torch.tensor([0, 1, 2, 3, 3, 3, 3, 3, 3], dtype=torch.int32, device=DEVICE),
        context_lens=torch.cat([call.context_lens, call.context_lens.new_zeros(5)]),
        page_tables=tables,
    )
    with dirty_memory():
        out = padded.run(whole=whole)
    assert same_bits(out[:3], call.run(whole=whole))
    assert not out[3:].any()


if EMULATED:

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("head_dim", [16, 64, 128])
    def test_compiled_attention_has_the_bits_of_the_published_order(head_dim: int, whole: bool) -> None:
        """The rules written out, row by row, with the matrix unit as others measured it."""
        call = make_call([300, 40], [2, 3], heads=(2, 1, head_dim))
        call.q[..., 0], call.q[..., -1] = LARGE, -LARGE
        call.k_cache[..., 0] = call.k_cache[..., -1] = LARGE
        expected = _all_published(call)
        assert same_bits(call.run(whole=whole), expected)
        # The controls: splits of another size are another order, and so are features the other way round.
        other = dataclasses.replace(attention_tile(EMULATED, head_dim, 2), split=64)
        assert not same_bits(call.run(tile=other, whole=whole), expected)
        turned = dataclasses.replace(call, q=call.q.flip(-1), k_cache=call.k_cache.flip(-1))
        assert head_dim == 16 or not same_bits(turned.run(whole=whole), expected)  # 16 may be one instruction

    def test_compiled_attention_adds_values_in_the_published_order() -> None:
        """All weights are 1, and large values cancel, so that each addition shows."""
        call = make_call([300, 40], [2, 3], heads=(2, 1, 64))
        call.q.zero_()
        for b in (0, 1):
            first, last = call.page_tables[b, 0], call.page_tables[b, 2]
            call.v_cache[first, 0], call.v_cache[last, 3] = LARGE**2, -(LARGE**2)
        expected = _all_published(call)
        assert same_bits(call.run(), expected)
        earlier = dataclasses.replace(call, v_cache=call.v_cache.clone())
        for b in (0, 1):  # the control: the same values, two of them exchanged
            page = call.page_tables[b, 0]
            earlier.v_cache[page, 0], earlier.v_cache[page, 5] = call.v_cache[page, 5], call.v_cache[page, 0]
            earlier.v_cache[call.page_tables[b, 2], 3] = call.v_cache[call.page_tables[b, 1], 1]
            earlier.v_cache[call.page_tables[b, 1], 1] = call.v_cache[call.page_tables[b, 2], 3]
        assert not same_bits(earlier.run(), expected)


LARGE = 2.0**11
"""Its square leaves two or three bits below the point in an accumulator."""


def _all_published(call: Call) -> torch.Tensor:
    """The output of a call with a single kv head, [T, heads, D]."""
    starts = call.query_starts.tolist()
    return torch.stack(
        [_published(call, b, row) for b in range(len(starts) - 1) for row in range(starts[b + 1] - starts[b])]
    )


def _published(call: Call, b: int, row: int) -> torch.Tensor:
    """The output of one query, [heads, D], of a call with a single kv head."""
    arch, tile = int(EMULATED[2:]), attention_tile(EMULATED, call.q.shape[-1], 2)
    end, length = int(call.query_starts[b + 1]), int(call.context_lens[b])
    token = int(call.query_starts[b]) + row
    position = length - (end - token)
    pages = call.page_tables[b, : -(-length // PAGE_SIZE)].long()
    k, v = (pool[pages].flatten(0, 1)[: position + 1, 0].float().numpy() for pool in (call.k_cache, call.v_cache))
    q = call.q[token].float().numpy()
    scale = np.float32(q.shape[-1] ** -0.5 * math.log2(math.e))
    state = _empty(q.shape)
    for split in range(0, position + 1, tile.split):
        m, l, o = _empty(q.shape)  # noqa: E741
        for block in range(split, min(split + tile.split, position + 1), tile.block_n):
            here = slice(block, min(block + tile.block_n, split + tile.split))
            keys, values = (np.pad(part, ((0, tile.block_n - len(part)), (0, 0))) for part in (k[here], v[here]))
            scores = project(arch, q, keys, "bf16") * scale
            scores[:, len(k[here]) :] = -np.inf
            new_m = np.maximum(m, scores.max(axis=1))
            p = exp2(scores - new_m[:, None])
            alpha = exp2(m - new_m)
            l = l * alpha + ieee.fold_halves(p)  # noqa: E741
            weights = from_bf16(to_bf16(p))
            o = project(arch, weights, np.ascontiguousarray(values.T), "bf16", o * alpha[:, None])
            m = new_m
        top = np.maximum(state[0], m)
        keep, take = exp2(state[0] - top), exp2(m - top)
        state = top, state[1] * keep + l * take, state[2] * keep[:, None] + o * take[:, None]
    return torch.from_numpy(state[2] / state[1][:, None] + 0).bfloat16()


def _empty(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum, mass and total of no key."""
    return np.full(shape[0], -np.inf, np.float32), np.zeros(shape[0], np.float32), np.zeros(shape, np.float32)


def test_a_tile_with_another_split_is_caught() -> None:
    """The control: the split is part of the order, so the comparison above must see a change of it."""
    call = make_call([290], [1], torch.float32, heads=(2, 1, 16))
    tile = attention_tile(arch_of(DEVICE), 16, 4)
    other = dataclasses.replace(tile, split=64)
    assert_agrees("attention.paged", call.run(tile=other), call.run(tile=tile))
    assert not same_bits(call.run(tile=other), call.run(tile=tile))


def test_too_large_groups_are_refused() -> None:
    call = make_call([5], [1], heads=(65, 1, 16))
    with pytest.raises(ValueError, match="65 query heads on 1 kv heads"):
        attention.paged(*call.arguments())


def test_other_dtypes_and_head_sizes_are_refused() -> None:
    call = make_call([5], [1])
    with pytest.raises(TypeError, match="expected one of float32, bfloat16, float16 for all of them"):
        attention.paged(*dataclasses.replace(call, q=call.q.double()).arguments())
    with pytest.raises(ValueError, match="does not fit caches"):
        attention.paged(*dataclasses.replace(call, q=call.q[..., :8]).arguments())
