"""Norms, rotary embedding, SiLU and embedding: the bits of the published order on every instruction set."""

from __future__ import annotations

import pytest
import torch

from aok_support import (
    DTYPES,
    FAST_VARIANTS,
    KINDS,
    ROW_COUNTS,
    VARIANTS,
    awkward,
    bits,
    narrowed,
    same_bits,
    threads,
    use_variant,
    wide,
)
from oracle import rows as oracle
from tokenspeed_kernels_aok.cpu import embedding, gemm, rows

EPS = 1e-6
KERNELS = {"_rms_norm": "_NORM", "_layer_norm": "_LAYER_NORM", "_rope": "_ROPE", "_silu_and_mul": "_SILU"}
NARROW = {torch.bfloat16: oracle.bf16, torch.float32: oracle.exact}
WIDTHS = (1, 15, 16, 64, 100, 147, 1024)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, rows, **KERNELS)
    use_variant(monkeypatch, request.param, embedding, _embedding="_EMBEDDING")
    return request.param


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_give_the_bits_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, residual, weight = (awkward(kind, 3, width, dtype=dtype, seed=seed) for seed in (0, 1, 2))
        weight = weight[0]
        expected = oracle.rms_norm(wide(x), wide(weight), EPS, NARROW[dtype])
        assert same_bits(rows.rms_norm(x, weight, EPS), narrowed(expected, dtype)), width
        out, total = rows.add_rms_norm(x, residual, weight, EPS)
        expected, expected_sum = oracle.add_rms_norm(wide(x), wide(residual), wide(weight), EPS, NARROW[dtype])
        assert same_bits(out, narrowed(expected, dtype)), width
        assert same_bits(total, narrowed(expected_sum, dtype)), width
        expected = oracle.layer_norm(wide(x), wide(weight), wide(residual[0]), EPS, NARROW[dtype])
        assert same_bits(rows.layer_norm(x, weight, residual[0], EPS), narrowed(expected, dtype)), width


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_gives_the_bits_of_the_oracle(kind: str, dtype: torch.dtype, interleaved: bool) -> None:
    positions = torch.tensor([4, 0, 6])
    for d, rotary in ((64, 64), (80, 80), (44, 38), (16, 0)):
        q, k = awkward(kind, 3, 4, d, dtype=dtype), awkward(kind, 3, 2, d, dtype=dtype, seed=1)
        table = awkward("normal", 7, rotary, dtype=torch.float32, seed=2)
        cosine, sine = (wide(part[positions]) for part in table.split([rotary // 2, rotary // 2], dim=1))
        for got, x in zip(rows.rope(q, k, positions, table, interleaved), (q, k), strict=True):
            expected = oracle.rope(wide(x), cosine, sine, interleaved, NARROW[dtype])
            assert same_bits(got[..., :rotary], narrowed(expected[..., :rotary], dtype)), (d, rotary)
            assert same_bits(got[..., rotary:], x[..., rotary:])


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_silu_gives_the_bits_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    for width in (*WIDTHS, 1500):
        x = awkward(kind, 3, 2 * width, dtype=dtype) * (20 if kind == "normal" else 1)
        assert same_bits(rows.silu_and_mul(x), narrowed(oracle.silu_and_mul(wide(x), NARROW[dtype]), dtype)), width


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_and_among_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = awkward("normal", 257, 6, 64, dtype=dtype), awkward("normal", 384, dtype=dtype, seed=1)
    flat, positions = x.view(257, 384), torch.arange(257)
    table = awkward("normal", 300, 64, dtype=torch.float32, seed=2)

    def run(part: slice) -> list[torch.Tensor]:
        return [
            rows.rms_norm(flat[part], weight, EPS),
            *rows.add_rms_norm(flat[part], flat.flip(0)[part], weight, EPS),
            rows.rms_norm(x[part], weight[:64], EPS),
            *rows.rope(x[part], x[part, :2], positions[part], table),
            rows.silu_and_mul(flat[part]),
        ]

    whole = run(slice(None))
    for variant in FAST_VARIANTS:
        use_variant(monkeypatch, variant, rows, **KERNELS)
        for count in (1, 2):
            with threads(count):
                for n in ROW_COUNTS:
                    for got, expected in zip(run(slice(257 - n, None)), whole, strict=True):
                        assert same_bits(got, expected[257 - n :]), (variant, count, n)


def test_control_another_row_has_other_bits() -> None:
    x = awkward("normal", 2, 64, dtype=torch.bfloat16)
    out = rows.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), EPS)
    assert not same_bits(out[0], out[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_give_the_bits_of_copies(dtype: torch.dtype) -> None:
    qkv = awkward("normal", 5, 12 * 48 + 3, dtype=dtype)[:, 3:]
    q, k, _ = qkv.split([8 * 48, 2 * 48, 2 * 48], dim=1)
    q, k = q.unflatten(1, (8, 48)), k.unflatten(1, (2, 48))
    weight, table = awkward("normal", 48, dtype=dtype), awkward("normal", 9, 48, dtype=torch.float32)
    positions = torch.arange(10)[::2].clamp(max=8)
    assert same_bits(rows.rms_norm(q, weight, EPS), rows.rms_norm(q.contiguous(), weight, EPS))
    strided, copied = rows.rope(q, k, positions, table), rows.rope(q.contiguous(), k.contiguous(), positions, table)
    assert all(same_bits(a, b) for a, b in zip(strided, copied, strict=True))
    gate_up = qkv[:, :200]
    assert same_bits(rows.silu_and_mul(gate_up), rows.silu_and_mul(gate_up.contiguous()))
    turned = gate_up.T.contiguous().T
    assert same_bits(rows.silu_and_mul(turned), rows.silu_and_mul(gate_up))
    assert same_bits(
        rows.rms_norm(turned, weight.new_ones(200), EPS), rows.rms_norm(gate_up, weight.new_ones(200), EPS)
    )


def test_close_to_torch() -> None:
    x, weight = awkward("normal", 64, 1024, dtype=torch.float32), awkward("normal", 1024, dtype=torch.float32, seed=1)
    exact = torch.nn.functional.rms_norm(x.double(), (1024,), weight.double(), EPS)
    torch_error = (torch.nn.functional.rms_norm(x, (1024,), weight, EPS) - exact).abs().max()
    assert (rows.rms_norm(x, weight, EPS) - exact).abs().max() <= 2 * torch_error
    gate, up = (x * 8).double().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    relative = ((rows.silu_and_mul(x * 8) - exact) / exact.abs().clamp(min=1e-30)).abs().max()
    assert relative < 4 * 2.0**-23


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_copies_rows_of_plain_and_packed_tables(dtype: torch.dtype) -> None:
    table = torch.randint(-(2**15), 2**15 - 1, (70, 33), dtype=torch.int32)
    table = (table.to(torch.int16) if dtype == torch.bfloat16 else table * 40503).view(dtype)  # any bits, NaN included
    ids = torch.tensor([69, 0, 3, 3, 16])
    expected = bits(table)[ids]
    assert torch.equal(bits(embedding.embedding(ids, table)), expected)
    assert torch.equal(bits(embedding.embedding(ids, gemm.prepare_linear(table))), expected)
    assert torch.equal(bits(embedding.embedding(ids, torch.cat([table, table], 1)[:, 33:])), expected)


def test_what_is_outside_a_table_is_nan() -> None:
    out = embedding.embedding(torch.tensor([0, -1, 5, 2**40]), torch.zeros(5, 4))
    assert out.isnan().all(dim=1).tolist() == [False, True, True, True]
    q = torch.zeros(2, 1, 8)
    q_out, k_out = rows.rope(q, q, torch.tensor([3, 4]), torch.zeros(4, 8))
    assert q_out.isnan().flatten(1).all(dim=1).tolist() == k_out.isnan().flatten(1).all(dim=1).tolist() == [False, True]


def test_empty_inputs() -> None:
    none = torch.zeros(0, 8)
    assert rows.rms_norm(none, torch.zeros(8), EPS).shape == (0, 8)
    assert [t.shape for t in rows.add_rms_norm(none, none, torch.zeros(8), EPS)] == [(0, 8)] * 2
    assert rows.silu_and_mul(none).shape == (0, 4)
    heads, positions = none.view(0, 2, 4), torch.zeros(0, dtype=torch.int64)
    assert [t.shape for t in rows.rope(heads, heads, positions, torch.zeros(4, 4))] == [(0, 2, 4)] * 2
    assert embedding.embedding(positions, none[:0]).shape == (0, 8)


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(TypeError, match=r"x: torch.float16 on cpu"):
        rows.rms_norm(x.half(), x[0].half(), EPS)
    with pytest.raises(TypeError, match=r"weight: torch.bfloat16, expected torch.float32"):
        rows.rms_norm(x, x[0].bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"weight is \[7\], expected a contiguous \[8\]"):
        rows.rms_norm(x, torch.zeros(7), EPS)
    with pytest.raises(ValueError, match=r"residual is \[1, 8\], x is \[2, 8\]"):
        rows.add_rms_norm(x, x[:1], x[0], EPS)
    with pytest.raises(ValueError, match="7 columns, expected an even number"):
        rows.silu_and_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="R even and at most D"):
        rows.rope(x[:, None], x[:, None], torch.zeros(2, dtype=torch.int64), torch.zeros(3, 10))
    with pytest.raises(TypeError, match=r"ids: torch.int32 on cpu, expected torch.int64"):
        embedding.embedding(torch.zeros(2, dtype=torch.int32), x)
