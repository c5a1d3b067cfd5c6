"""moe.route and moe.experts: the bits of the published order, whoever else chose the same experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aok_support import (
    DTYPES,
    FAST_VARIANTS,
    KINDS,
    VARIANTS,
    awkward,
    narrowed,
    same_bits,
    threads,
    use_variant,
    wide,
)
from oracle import moe as oracle
from oracle import rows as narrowing
from tokenspeed.kernels.reference import moe as reference
from tokenspeed_kernels_aok.cpu import gemm, moe, rows

# (experts, k, scoring, form, biased, normalise, scale, groups, kept groups)
ROUTINGS = [
    (32, 4, "softmax", "torch", False, True, 1.0, 1, 1),
    (32, 4, "softmax", "fused", False, True, 1.0, 1, 1),
    (130, 8, "softmax", "torch", False, False, 1.0, 1, 1),
    (130, 8, "softmax", "fused", False, False, 1.0, 1, 1),
    (48, 5, "softmax", "fused", True, False, 6.0, 1, 1),
    (32, 4, "sigmoid", "torch", True, True, 2.5, 8, 4),
    (32, 4, "sigmoid", "torch", False, False, 1.0, 4, 1),
    (7, 7, "sigmoid", "fused", False, True, 1.0, 1, 1),
]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, moe, _route="_ROUTE", _experts="_EXPERTS")
    return request.param


def narrow_of(dtype: torch.dtype) -> narrowing.Narrow:
    return narrowing.bf16 if dtype == torch.bfloat16 else narrowing.exact


class Layer:
    """Random experts, plain and packed, and a choice of experts for each token."""

    def __init__(
        self, dtype: torch.dtype, tokens: int, *, experts: int = 5, k: int = 3, h: int = 70, f: int = 37
    ) -> None:
        self.dtype = dtype
        self.x = awkward("normal", tokens, h, dtype=dtype)
        self.gate_up = awkward("normal", experts, 2 * f, h, dtype=dtype, seed=1)
        self.down = awkward("normal", experts, h, f, dtype=dtype, seed=2)
        self.packed = gemm.prepare_batched(self.gate_up), gemm.prepare_batched(self.down)
        logits = awkward("normal", tokens, experts, dtype=torch.float32, seed=3)
        self.weights, self.ids = reference.route(logits, None, k, "softmax", "torch")

    def run(self, rows: slice | torch.Tensor = slice(None), ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = self.ids if ids is None else ids
        return moe.experts(self.x[rows], *self.packed, self.weights[rows], ids[rows], "slot")

    def expected(self, ids: torch.Tensor | None = None, *, turned: bool = False) -> torch.Tensor:
        chosen = (self.ids if ids is None else ids).numpy()
        parts = wide(self.x), wide(self.gate_up), wide(self.down), wide(self.weights)
        return narrowed(oracle.experts(*parts, chosen, narrow_of(self.dtype), turned=turned), self.dtype)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "ties"])
def test_choices_and_weights_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    for seed, (experts, k, scoring, form, biased, normalise, scale, groups, kept) in enumerate(ROUTINGS):
        logits = awkward("normal" if kind == "ties" else kind, 6, experts, dtype=dtype, seed=seed)
        if kind == "ties":  # most scores are equal to several others
            logits = (logits * 2).round() / 2
        bias = (awkward("normal", experts, dtype=torch.float32, seed=9) * 4).round() / 16 if biased else None
        weights, ids = moe.route(logits, bias, k, scoring, form, normalise, scale, groups, kept)
        for row in range(len(logits)):
            expected = oracle.route_row(
                wide(logits)[row],
                None if bias is None else wide(bias),
                k,
                scoring,
                form,
                normalise,
                scale,
                groups,
                kept,
            )
            assert ids[row].tolist() == expected[1], (seed, row)
            assert same_bits(weights[row], torch.from_numpy(expected[0])), (seed, row)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("form", moe.FORMS)
def test_exact_ties_and_one_ulp(form: str) -> None:
    """Equal logits go to the lowest expert; one ulp more wins where the score that is compared can tell it."""
    logits = torch.full((3, 64), 1.0)
    logits[1, 50] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    logits[2, 50] = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    for scoring in moe.SCORINGS:
        weights, ids = moe.route(logits, None, 4, scoring, form)
        assert ids[0].tolist() == [0, 1, 2, 3]
        scores = [oracle.softmax(wide(row)) if scoring == "softmax" else oracle.sigmoid(wide(row)) for row in logits]
        seen = (form == "fused" and scoring == "softmax") or scores[1][50] > scores[1][0]
        assert ids[1].tolist() == ([50, 0, 1, 2] if seen else [0, 1, 2, 3])
        assert ids[2].tolist() == [0, 1, 2, 3]
        assert same_bits(weights[0], weights[0][:1].expand(4))
    biased = moe.route(logits, torch.eye(64)[7] * 1e-6, 2, "sigmoid", form)[1]
    assert biased[0].tolist() == [7, 0]


def test_the_reference_chooses_the_same_experts() -> None:
    for seed, (experts, k, scoring, form, biased, normalise, scale, groups, kept) in enumerate(ROUTINGS):
        logits = awkward("normal", 40, experts, dtype=torch.float32, seed=seed)
        bias = awkward("normal", experts, dtype=torch.float32, seed=9) / 8 if biased else None
        arguments = logits, bias, k, scoring, form, normalise, scale, groups, kept
        weights, ids = moe.route(*arguments)
        expected_weights, expected_ids = reference.route(*arguments)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(weights, expected_weights, rtol=2e-6, atol=1e-7)


def test_a_token_is_routed_alone() -> None:
    logits = awkward("normal", 70, 33, dtype=torch.bfloat16)
    weights, ids = moe.route(logits, None, 4, "softmax", "torch")
    for count in (1, 2):
        with threads(count):
            for rows_ in (slice(0, 1), slice(69, 70), slice(3, 20)):
                part = moe.route(logits[rows_], None, 4, "softmax", "torch")
                assert same_bits(part[0], weights[rows_])
                assert torch.equal(part[1], ids[rows_])


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_the_oracle(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 5)
    assert same_bits(layer.run(), layer.expected())
    with_identities = torch.tensor([[5, 0, 1], [2, 9, 6], [5, 6, 7], [4, 3, 5], [0, 0, 0]], dtype=torch.int32)
    assert same_bits(layer.run(ids=with_identities), layer.expected(with_identities))


@pytest.mark.parametrize("dtype", DTYPES)
def test_control_another_slot_order_gives_other_bits(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 5)
    layer.ids[:, 1] = layer.ids[:, 0]
    layer.weights = torch.tensor([1e6, -1e6, 1.0]).expand(5, 3).contiguous()  # two slots cancel, in one order exactly
    assert same_bits(layer.run(), layer.expected())
    assert not same_bits(layer.run(), layer.expected(turned=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_and_among_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any subset, any order, any threads and instruction set; K and F above one block of a projection."""
    layer = Layer(dtype, 100, experts=6, h=300, f=260)
    with threads(1):
        whole = layer.run()
    order = torch.randperm(100, generator=torch.Generator().manual_seed(4))
    for name in FAST_VARIANTS:
        use_variant(monkeypatch, name, moe, _route="_ROUTE", _experts="_EXPERTS")
        for count in (1, 2):
            with threads(count):
                assert same_bits(layer.run(order), whole[order]), (name, count)
                for size in (1, 2, 3, 7, 33):
                    assert same_bits(layer.run(slice(0, size)), whole[:size]), (name, count, size)
                    assert same_bits(layer.run(slice(-size, None)), whole[-size:]), (name, count, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert_gets_every_token_and_most_get_none(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 60, experts=9, h=96, f=48)
    alone = layer.run(slice(7, 8))
    crowded = layer.ids.clone()
    crowded[:7], crowded[8:] = crowded[7], crowded[7]  # everybody follows token 7
    assert same_bits(layer.run(ids=crowded)[7:8], alone)
    lonely = torch.full_like(layer.ids, 8)
    lonely[7] = layer.ids[7]
    assert same_bits(layer.run(ids=lonely)[7:8], alone)
    assert same_bits(layer.run(ids=layer.ids)[7:8], alone)


def test_only_the_weights_of_chosen_experts_are_read() -> None:
    layer = Layer(torch.bfloat16, 4, experts=8)
    used = set(layer.ids.flatten().tolist())
    unused = [expert for expert in range(8) if expert not in used]
    assert unused
    expected = layer.run()
    for packed in layer.packed:
        for expert in unused:
            packed.data[expert * packed.group_bytes : (expert + 1) * packed.group_bytes] = 0xFF  # NaN everywhere
    assert same_bits(layer.run(), expected)


def test_an_expert_is_the_single_operators_one_after_another() -> None:
    """The same bits as gemm.linear, silu_and_mul, gemm.linear and plain torch for the fold."""
    layer = Layer(torch.bfloat16, 6)
    total = torch.zeros(6, 70)
    for slot in range(3):
        for t in range(6):
            expert = int(layer.ids[t, slot])
            up = gemm.linear(layer.x[t : t + 1], gemm.prepare_linear(layer.gate_up[expert]))
            y = gemm.linear(rows.silu_and_mul(up), gemm.prepare_linear(layer.down[expert]))
            total[t] = total[t] + layer.weights[t, slot] * y[0].float()
    assert same_bits(layer.run(), total.bfloat16())


def test_nan_stays_with_its_token() -> None:
    layer = Layer(torch.bfloat16, 6)
    expected = layer.run()
    layer.x[2, 5] = torch.nan
    out = layer.run()
    assert out[2].isnan().all()
    keep = torch.tensor([0, 1, 3, 4, 5])
    assert same_bits(out[keep], expected[keep])
    weights, ids = moe.route(torch.full((1, 8), torch.nan), None, 2, "softmax", "torch")
    assert ids.tolist() == [[0, 1]]
    assert weights.isnan().all()


def test_empty_inputs() -> None:
    weights, ids = moe.route(torch.zeros(0, 8), None, 2, "softmax", "torch")
    assert weights.shape == ids.shape == (0, 2)
    layer = Layer(torch.float32, 1)
    assert layer.run(slice(0, 0)).shape == (0, 70)


def test_wrong_arguments_are_named() -> None:
    logits = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="scoring 'relu'"):
        moe.route(logits, None, 2, "relu", "torch")
    with pytest.raises(ValueError, match="12 experts in 5 groups"):
        moe.route(logits, None, 2, "sigmoid", "torch", groups=5)
    with pytest.raises(ValueError, match="top_k is 5, and 4 of 12"):
        moe.route(logits, None, 5, "sigmoid", "torch", groups=3)
    with pytest.raises(TypeError, match=r"bias: torch.bfloat16"):
        moe.route(logits, torch.zeros(12, dtype=torch.bfloat16), 2, "sigmoid", "torch")
    layer = Layer(torch.float32, 2)
    with pytest.raises(ValueError, match="x has 8 columns"):
        moe.experts(torch.zeros(2, 8), *layer.packed, layer.weights, layer.ids, "slot")
    with pytest.raises(ValueError, match="negative"):
        moe.experts(layer.x, *layer.packed, layer.weights, -layer.ids - 1, "slot")
    with pytest.raises(TypeError, match=r"ids: torch.int64"):
        moe.experts(layer.x, *layer.packed, layer.weights, layer.ids.long(), "slot")
    with pytest.raises(ValueError, match="order 'any'"):
        moe.experts(layer.x, *layer.packed, layer.weights, layer.ids, "any")


def test_oracle_of_softmax_is_near_the_exact_one() -> None:
    x = np.linspace(-20, 5, 100, dtype=np.float32)
    exact = np.exp(x.astype(np.float64) - 5)
    assert np.abs(oracle.softmax(x) / (exact / exact.sum()) - 1).max() < 3e-6
