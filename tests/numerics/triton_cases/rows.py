"""Row operators: norms, rope, silu, embedding and cache writes, bit for bit against NumPy or the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import functions, ieee
from tokenspeed.kernels import reference
from tokenspeed.kernels.reference import cache as reference_cache
from tokenspeed.kernels.reference import norm as reference_norm
from tokenspeed.kernels.reference import rope as reference_rope
from tokenspeed_kernels_aok.triton import activation, cache, embedding, norm, rope
from triton_cases.support import (
    DEVICE,
    DTYPES,
    MODEL_SIZED,
    assert_agrees,
    assert_rows_do_not_depend_on_the_batch,
    float_bits,
    random,
    same_bits,
)

assert reference  # the package of the modules above

EPS = 1e-6


def _inverse_rms(x: np.ndarray) -> np.ndarray:
    """1 / sqrt(mean square + eps) by the published tree: zero-padded to a power of two, folded by halves."""
    padded = np.zeros((len(x), 1 << (x.shape[1] - 1).bit_length()), np.float32)
    padded[:, : x.shape[1]] = ieee.mul(x, x)
    mean = ieee.div(ieee.fold_halves(padded), np.float32(x.shape[1]))
    return ieee.div(np.float32(1), ieee.sqrt(ieee.add(mean, np.float32(EPS))))


@pytest.mark.parametrize("hidden", [96, 128, 1000, *([4096, 16384] if MODEL_SIZED else [])])
def test_norms_have_the_bits_of_the_published_order(hidden: int) -> None:
    x, residual, weight = random(5, hidden), random(5, hidden, seed=1), random(hidden, seed=2)
    total = ieee.add(x.cpu().numpy(), residual.cpu().numpy())
    for values, out in (
        (x.cpu().numpy(), norm.rms(x, weight, EPS)),
        (total, norm.add_rms(x, residual, weight, EPS)[0]),
    ):
        expected = ieee.mul(ieee.mul(values, _inverse_rms(values)[:, None]), weight.cpu().numpy())
        assert np.array_equal(float_bits(out), float_bits(expected))
    assert np.array_equal(float_bits(norm.add_rms(x, residual, weight, EPS)[1]), float_bits(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_agree_with_the_reference(dtype: torch.dtype) -> None:
    x, residual, weight = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype, seed=1), random(96, dtype=dtype)
    assert_agrees("norm.rms", norm.rms(x, weight, EPS), reference_norm.rms(x, weight, EPS))
    pairs = zip(norm.add_rms(x, residual, weight, EPS), reference_norm.add_rms(x, residual, weight, EPS), strict=True)
    for actual, expected in pairs:
        assert_agrees("norm.add_rms", actual, expected)
    heads = random(5, 12, 32, dtype=dtype)[:, 3:7]
    assert_agrees("norm.rms", norm.rms(heads, weight[:32], EPS), reference_norm.rms(heads, weight[:32], EPS))


def test_norm_rows_do_not_depend_on_the_batch_or_on_strides() -> None:
    weight = random(96, dtype=torch.bfloat16, seed=1)
    rows = random(128, 96, dtype=torch.bfloat16)
    assert_rows_do_not_depend_on_the_batch(lambda x: norm.rms(x, weight, EPS), rows)
    wide = torch.zeros(128, 101, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 3:99] = rows
    assert same_bits(norm.rms(wide[:, 3:99], weight, EPS), norm.rms(rows, weight, EPS))


def test_norms_of_another_width_are_refused() -> None:
    x, weight = random(5, 96), random(95)
    for call in (lambda: norm.rms(x, weight, EPS), lambda: norm.add_rms(x, x, weight, EPS)):
        with pytest.raises(ValueError, match=r"weight is \[95\], x is \[5, 96\]"):
            call()
    with pytest.raises(ValueError, match=r"residual is \[5, 97\], x is \[5, 96\]"):
        norm.add_rms(x, random(5, 97), random(96), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 12])
def test_rope_has_the_bits_of_the_reference(dtype: torch.dtype, interleaved: bool, rotary_dim: int) -> None:
    q, k = random(5, 12, 32, dtype=dtype), random(5, 20, 32, dtype=dtype, seed=1)[:, 2:5]
    table = random(50, rotary_dim, seed=2)
    positions = torch.tensor([0, 3, 49, 7, 1], device=DEVICE)
    actual = rope.apply(q, k, positions, table, interleaved)
    expected = reference_rope.apply(q, k, positions, table, interleaved)
    assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))


def test_silu_has_the_bits_of_the_published_exp() -> None:
    gate_up = random(4, 140) * 8
    gate, up = np.split(gate_up.cpu().numpy(), 2, axis=-1)
    expected = ieee.mul(ieee.div(gate, ieee.add(np.float32(1), functions.exp(-gate))), up)
    assert np.array_equal(float_bits(activation.silu_and_mul(gate_up)), float_bits(expected))


def test_embedding_and_cache_copy_bits() -> None:
    for dtype in DTYPES:
        table = random(130, 96, dtype=dtype)
        ids = torch.tensor([3, 1, 1, 129], device=DEVICE)
        assert same_bits(embedding.lookup(ids, table), table[ids])
        k, v = random(5, 3, 16, dtype=dtype), random(5, 7, 16, dtype=dtype, seed=1)[:, 2:5]
        slots = torch.tensor([5, -1, 63, 0, 17], device=DEVICE)
        actual = [torch.zeros(4, 16, 3, 16, dtype=dtype, device=DEVICE) for _ in range(2)]
        expected = [torch.zeros_like(pages) for pages in actual]
        cache.write(k, v, *actual, slots)
        reference_cache.write(k, v, *expected, slots)
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
        assert actual[1].any()


def test_caches_of_different_strides_are_refused() -> None:
    k = random(1, 3, 16)
    pages = torch.zeros(4, 16, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match="strides"):
        cache.write(k, k, pages, pages.transpose(0, 1), torch.zeros(1, dtype=torch.int64, device=DEVICE))
