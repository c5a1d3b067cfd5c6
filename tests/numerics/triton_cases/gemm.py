"""`gemm.linear` and `gemm.batched`: agreement, one order for every tile, rows alone and in a batch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ptx_emulator.matrix import project
from tokenspeed.kernels.reference import gemm as reference
from tokenspeed_kernels_aok.triton import gemm
from tokenspeed_kernels_aok.triton.launch import INTERPRETED
from tokenspeed_kernels_aok.triton.tiles import GEMM, GemmTable, GemmTile
from triton_cases.support import (
    DEVICE,
    DTYPES,
    EMULATED,
    THOROUGH,
    architectures,
    assert_agrees,
    assert_rows_do_not_depend_on_the_batch,
    random,
    same_bits,
)


def _tiles(table: GemmTable) -> list[GemmTile]:
    """The table's tiles; in the interpreter those whose products fit into its largest tensor."""
    largest = tl.TRITON_MAX_TENSOR_NUMEL if INTERPRETED else 2**62
    tiles = [tile for tile in table.tiles if tile.block_m * tile.block_n * table.block_k <= largest]
    assert len(tiles) >= len(table.tiles) - 1
    return tiles


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(37, 200, 130), (1, 64, 64), (130, 72, 300), (3, 67, 5)])
def test_linear_agrees_with_the_reference(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    x, weight, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    prepared = gemm.prepare_linear(weight)
    assert_agrees("gemm.linear", gemm.linear(x, prepared, bias), reference.linear(x, weight, bias))
    assert_agrees("gemm.linear", gemm.linear(x, prepared), reference.linear(x, weight))


def test_linear_takes_strided_rows_and_no_rows() -> None:
    x, weight = random(9, 128, dtype=torch.bfloat16), random(40, 64, dtype=torch.bfloat16, seed=1)
    assert same_bits(gemm.linear(x[:, :64], weight), gemm.linear(x[:, :64].contiguous(), weight))
    assert gemm.linear(x[:0, :64], weight).shape == (0, 40)


def test_operands_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    x, weight = random(3, 64), random(5, 64)
    for wide in (random(3, 65), random(3, 63)):
        with pytest.raises(ValueError, match=r"does not fit weight \[5, 64\]"):
            gemm.linear(wide, weight)
    with pytest.raises(ValueError, match=r"and bias \[4\]"):
        gemm.linear(x, weight, random(4))
    with pytest.raises(ValueError, match=r"does not fit weight \[2, 5, 64\]"):
        gemm.batched(random(3, 3, 64), random(2, 5, 64))
    for other in (x.double(), x.bfloat16()):
        with pytest.raises(TypeError, match="expected one of float32, bfloat16, float16 for all of them"):
            gemm.linear(other, weight.double())


def test_prepared_weights_are_kept_where_their_rows_are_aligned() -> None:
    aligned, odd = random(5, 64, dtype=torch.bfloat16), random(5, 67, dtype=torch.bfloat16)
    assert gemm.prepare_linear(aligned).data_ptr() == aligned.data_ptr()
    assert gemm.prepare_linear(odd).stride() == (80, 1)
    assert same_bits(gemm.prepare_linear(odd), odd)


def test_what_lies_behind_a_row_is_not_read() -> None:
    """Rows of an odd size in wider memory, where the next 16 elements would be loaded at once."""
    wide, wide_weight = torch.full((9, 80), torch.nan), torch.full((5, 80), torch.nan)
    wide[:, :67], wide_weight[:, :67] = random(9, 67), random(5, 67, seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = wide.to(DEVICE, dtype)[:, :67], wide_weight.to(DEVICE, dtype)[:, :67]
        expected = reference.linear(x, weight)
        assert_agrees("gemm.linear", gemm.linear(x, weight), expected)
        grouped = gemm.batched(x.unsqueeze(1).expand(-1, 2, -1), weight.expand(2, -1, -1))
        assert_agrees("gemm.batched", grouped[:, 1].contiguous(), expected)


@pytest.mark.parametrize("arch", architectures(GEMM))
@pytest.mark.parametrize("dtype", DTYPES if THOROUGH else (torch.bfloat16, torch.float32))  # fp16 has bf16's tables
def test_every_tile_of_a_table_gives_the_same_bits(arch: str, dtype: torch.dtype) -> None:
    x, weight, bias = random(70, 200, dtype=dtype), random(150, 200, dtype=dtype, seed=1), random(150, dtype=dtype)
    table = gemm.table_for(arch, dtype)
    first, *others = [gemm.linear_by(table, tile, x, weight, bias) for tile in _tiles(table)]
    assert all(same_bits(other, first) for other in others)
    assert torch.isfinite(first).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    weight = random(72, 136, dtype=dtype, seed=1)
    assert_rows_do_not_depend_on_the_batch(lambda x: gemm.linear(x, weight), random(128, 136, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batched_agrees_and_its_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = random(128, 3, 72, dtype=dtype), random(3, 40, 72, dtype=dtype, seed=1)
    out = gemm.batched(x, weight)
    assert out.is_contiguous()
    assert_agrees("gemm.batched", out, reference.batched(x, weight))
    assert_rows_do_not_depend_on_the_batch(lambda rows: gemm.batched(rows, weight), x)
    for arch in architectures(GEMM):
        table = gemm.table_for(arch, dtype)
        first, *others = [gemm.batched_by(table, tile, x, weight) for tile in _tiles(table)]
        assert all(same_bits(other, first) for other in others)


LARGE = 2.0**11
"""Its square leaves two or three bits below the point in an accumulator."""

if EMULATED:

    @pytest.mark.parametrize("m", [1, 20, 130])
    def test_compiled_projections_add_ascending_k_one_instruction_after_another(m: int) -> None:
        """The published rule, with the matrix unit as others measured it: K by sixteen, in no other order.

        Large products that cancel, at the two ends of K, make every place where something is cut off show in bf16.
        """
        x, weight, bias = (
            random(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate([(m, 200), (70, 200), (70,)])
        )
        x[:, 0], x[:, -1] = LARGE, -LARGE
        weight[:, 0] = weight[:, -1] = LARGE
        total = project(int(EMULATED[2:]), x.float().numpy(), weight.float().numpy(), "bf16")
        expected = torch.from_numpy(total + bias.float().numpy()).bfloat16()
        assert same_bits(gemm.linear(x, weight, bias), expected)
        # The control: the same products in descending K have other bits.
        assert not same_bits(gemm.linear(x.flip(1), weight.flip(1), bias), expected)


@triton.jit
def _split_k_kernel(x, weight, out, depth, columns, PART: tl.constexpr, BLOCK: tl.constexpr):
    """One row: PART elements of K at a time, added left to right. The fault that batch-dependent split-K makes."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, depth, PART):
        k = start + tl.arange(0, PART)
        part = tl.load(weight + n[:, None] * depth + k[None, :])
        total += tl.sum(part * tl.load(x + row * depth + k)[None, :], axis=1)
    tl.store(out + row * columns + n, total)


def _linear_that_splits_k_for_few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), len(weight), device=DEVICE)
    part = 16 if len(x) < 16 else 64
    _split_k_kernel[(len(x),)](x, weight, out, x.shape[1], len(weight), PART=part, BLOCK=8, enable_fp_fusion=False)
    return out


def test_a_kernel_that_splits_k_by_batch_size_is_caught() -> None:
    x, weight = random(128, 128), random(8, 128, seed=1)
    assert_agrees("gemm.linear", _linear_that_splits_k_for_few_rows(x, weight), reference.linear(x, weight))
    with pytest.raises(AssertionError, match="depend on the batch"):
        assert_rows_do_not_depend_on_the_batch(lambda rows: _linear_that_splits_k_for_few_rows(rows, weight), x)
