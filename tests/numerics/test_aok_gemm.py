"""gemm.linear and gemm.batched: the bits of the published order, whatever the rows, threads and instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aok_support import (
    DTYPES,
    FAST_VARIANTS,
    KINDS,
    ROW_COUNTS,
    VARIANTS,
    awkward,
    narrowed,
    same_bits,
    threads,
    use_variant,
    wide,
)
from oracle import gemm as oracle
from tokenspeed_kernels_aok.cpu import gemm

MIXED = [(x, w) for x in DTYPES for w in DTYPES]
SHAPES = [(1, 512, 16), (5, 301, 23), (14, 77, 65), (3, 1, 1), (2, 2, 130)]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, gemm, _gemm="_GEMM")
    return request.param


def test_this_machine_has_several_variants_to_compare() -> None:
    assert len(VARIANTS) > 1, f"only the {VARIANTS[0]} variant runs here: agreement of instruction sets is NOT tested"


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(("x_dtype", "w_dtype"), MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_oracle(kind: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for seed, (m, k, n) in enumerate(SHAPES):
        x = awkward(kind, m, k, dtype=x_dtype, seed=seed)
        w = awkward(kind, n, k, dtype=w_dtype, seed=seed + 50)
        bias = awkward(kind, n, dtype=w_dtype, seed=seed + 90)
        packed = gemm.prepare_linear(w)
        for given_bias in (None, bias):
            expected = oracle.linear(wide(x), wide(w), None if given_bias is None else wide(given_bias))
            assert same_bits(gemm.linear(x, packed, given_bias), narrowed(expected, x_dtype)), (m, k, n)


@pytest.mark.usefixtures("variant")
def test_control_another_order_gives_other_bits() -> None:
    x, w = awkward("normal", 4, 300, dtype=torch.float32), awkward("normal", 9, 300, dtype=torch.float32, seed=1)
    other = oracle.linear(wide(x), wide(w), odd_first=False)
    assert not same_bits(gemm.linear(x, gemm.prepare_linear(w)), narrowed(other, torch.float32))


@pytest.mark.parametrize(("x_dtype", "w_dtype"), MIXED)
def test_a_row_alone_and_among_others(
    x_dtype: torch.dtype, w_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = awkward("normal", 257, 600, dtype=x_dtype)
    packed = gemm.prepare_linear(awkward("normal", 203, 600, dtype=w_dtype, seed=1))
    with threads(1):
        use_variant(monkeypatch, VARIANTS[-1], gemm, _gemm="_GEMM")
        whole = gemm.linear(x, packed)
    for variant in FAST_VARIANTS:
        use_variant(monkeypatch, variant, gemm, _gemm="_GEMM")
        for count in (1, 2):
            with threads(count):
                for rows in ROW_COUNTS:
                    assert same_bits(gemm.linear(x[:rows], packed), whole[:rows]), (variant, count, rows)
                    assert same_bits(gemm.linear(x[-rows:], packed), whole[-rows:]), (variant, count, rows)
    use_variant(monkeypatch, "portable", gemm, _gemm="_GEMM")
    assert same_bits(gemm.linear(x[3:12], packed), whole[3:12])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_choice_of_rows(data: st.DataObject) -> None:
    m, k, n = (data.draw(st.integers(1, top)) for top in (70, 530, 140))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = awkward("cancelling", m, k, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    packed = gemm.prepare_linear(awkward("normal", n, k, dtype=dtype, seed=7))
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=80)))
    with threads(data.draw(st.sampled_from((1, 2)))):
        part = gemm.linear(x[chosen], packed)
    assert same_bits(part, gemm.linear(x, packed)[chosen])


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_like_single_projections(dtype: torch.dtype) -> None:
    x, w = awkward("normal", 9, 5, 70, dtype=dtype), awkward("normal", 5, 33, 70, dtype=dtype, seed=1)
    out = gemm.batched(x, gemm.prepare_batched(w))
    for g in range(5):
        assert same_bits(out[:, g], gemm.linear(x[:, g], gemm.prepare_linear(w[g])))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(gemm.batched(turned, gemm.prepare_batched(w)), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_alignment_do_not_matter(dtype: torch.dtype) -> None:
    x, w = awkward("normal", 11, 90, dtype=dtype), awkward("normal", 40, 90, dtype=dtype, seed=1)
    expected = gemm.linear(x, gemm.prepare_linear(w))
    shifted = torch.empty(11 * 90 + 1, dtype=dtype)[1:].view(11, 90).copy_(x)
    wider = torch.empty(11, 117, dtype=dtype)[:, 5:95].copy_(x)
    turned = x.T.contiguous().T
    for view in (shifted, wider, turned):
        assert same_bits(gemm.linear(view, gemm.prepare_linear(w)), expected)
    assert same_bits(gemm.linear(x, gemm.prepare_linear(w.T.contiguous().T)), expected)


@pytest.mark.usefixtures("variant")
def test_nan_and_infinity_arrive() -> None:
    x = torch.zeros(3, 300, dtype=torch.bfloat16)
    x[0, 299], x[1, 0] = torch.nan, torch.inf
    w = torch.ones(20, 300, dtype=torch.bfloat16)
    out = gemm.linear(x, gemm.prepare_linear(w))
    assert out[0].isnan().all()
    assert (out[1] == torch.inf).all()
    assert (out[2] == 0).all()


@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 4), (3, 8, 0), (0, 0, 0)])
def test_empty_inputs(m: int, k: int, n: int) -> None:
    assert gemm.linear(torch.zeros(m, k), gemm.prepare_linear(torch.zeros(n, k))).shape == (m, n)


def test_no_columns_to_add_leave_the_bias() -> None:
    bias = torch.tensor([1.0, -2.0])
    assert torch.equal(gemm.linear(torch.zeros(3, 0), gemm.prepare_linear(torch.zeros(2, 0)), bias), bias.expand(3, 2))


def test_wrong_arguments_are_named() -> None:
    packed = gemm.prepare_linear(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"x has 7 columns, the weight \[4,8\] takes 8"):
        gemm.linear(torch.zeros(2, 7), packed)
    with pytest.raises(TypeError, match=r"x: torch.float16 on cpu"):
        gemm.linear(torch.zeros(2, 8, dtype=torch.float16), packed)
    with pytest.raises(TypeError, match=r"bias: torch.bfloat16, expected torch.float32"):
        gemm.linear(torch.zeros(2, 8), packed, torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"bias is \[5\]"):
        gemm.linear(torch.zeros(2, 8), packed, torch.zeros(5))
    with pytest.raises(ValueError, match=r"x is \[T,2,8\], the weight \[1,4,8\] takes \[T,1,8\]"):
        gemm.batched(torch.zeros(2, 2, 8), packed)
    with pytest.raises(TypeError, match=r"weight: torch.float16"):
        gemm.prepare_linear(torch.zeros(4, 8, dtype=torch.float16))


@pytest.mark.parametrize("k", [1024, 3072])
def test_no_less_accurate_than_torch(k: int) -> None:
    x, w = awkward("normal", 16, k, dtype=torch.float32), awkward("normal", 256, k, dtype=torch.float32, seed=1)
    exact = x.double() @ w.double().T

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).square().mean().sqrt())

    assert error(gemm.linear(x, gemm.prepare_linear(w))) <= 1.25 * error(torch.nn.functional.linear(x, w))
    narrow_x, narrow_w = x.bfloat16(), w.bfloat16()
    exact = narrow_x.double() @ narrow_w.double().T
    ours = gemm.linear(narrow_x, gemm.prepare_linear(narrow_w))
    assert error(ours) <= 1.001 * error(torch.nn.functional.linear(narrow_x, narrow_w))
