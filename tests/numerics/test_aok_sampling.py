"""Sampling and log-probabilities: the bits and tokens of the published order, for every row by itself."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import pytest
import torch

from aok_support import DTYPES, FAST_VARIANTS, KINDS, VARIANTS, awkward, same_bits, threads, use_variant, wide
from oracle import functions, ieee
from oracle import sampling as oracle
from tokenspeed.kernels.reference import sampling as reference
from tokenspeed_kernels_aok.cpu import sampling

KERNELS = {"_block_sumexp": "_BLOCK_SUMEXP", "_logprobs": "_LOGPROBS", "_sample": "_SAMPLE"}
VOCABULARIES = (1, 15, 64, 65, 320, 4097, 9000)
ORDERS = (("torch", 1), ("megatron", 32768), ("megatron", 1000))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, sampling, **KERNELS)
    return request.param


@dataclass(frozen=True)
class Setting:
    """How one row is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


SETTINGS = (
    Setting(temperature=0),
    Setting(),
    Setting(0.7, top_p=0.9, seed=1),
    Setting(1.3, top_p=0.5, seed=-2, position=7),
    Setting(top_k=50, seed=2**63 - 1, position=2**40 + 3),
    Setting(top_k=5, top_p=0.7, seed=-(2**63)),
    Setting(0.3, top_k=1, seed=5),
    Setting(2.0, min_p=0.05, seed=6),
    Setting(1.0, top_k=1000, top_p=0.95, min_p=0.01, seed=7),
    Setting(5.0, top_p=0.99, seed=8),
    Setting(0.9, top_p=0.0, seed=9),
    Setting(1e-6, top_p=0.9, seed=10),
    Setting(1e6, top_p=0.3, seed=11),
    Setting(1.0, top_p=1e-30, min_p=1.0, seed=12),
    Setting(1.1, top_k=300, seed=13),
)
COLUMN_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)


def sample(logits: torch.Tensor, settings: list[Setting]) -> list[int]:
    columns = zip(*map(astuple, settings), strict=True)
    tensors = (torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, COLUMN_DTYPES, strict=True))
    return sampling.sample(logits, *tensors).tolist()


def expected(logits: torch.Tensor, settings: list[Setting]) -> list[int]:
    return [oracle.sample(row, *astuple(one)) for row, one in zip(wide(logits), settings, strict=True)]


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
def test_tokens_are_those_of_the_oracle(spread: float, dtype: torch.dtype) -> None:
    settings = list(SETTINGS)
    for vocabulary in VOCABULARIES:
        logits = (awkward("normal", len(settings), vocabulary, dtype=torch.float32, seed=vocabulary) * spread).to(dtype)
        assert sample(logits, settings) == expected(logits, settings), vocabulary


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "equal", "steps", "masked", "far"])
def test_awkward_rows_give_the_tokens_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    settings = list(SETTINGS)
    if kind in KINDS:
        logits = awkward(kind, len(settings), 900, dtype=dtype)
    else:
        logits = awkward("normal", len(settings), 900, dtype=torch.float32)
        if kind == "equal":  # the kept set is cut by token id alone
            logits = torch.full_like(logits, 3.25)
        elif kind == "steps":
            logits = logits.round()
        elif kind == "masked":
            logits[torch.rand_like(logits) < 0.9] = -torch.inf
        else:  # a unit in the last place is more than the noise
            logits += 3e7
        logits = logits.to(dtype)
    assert sample(logits, settings) == expected(logits, settings)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_token(dtype: torch.dtype) -> None:
    logits = awkward("normal", 4, 100, dtype=dtype)
    logits[0, 99], logits[1, 50], logits[2] = torch.nan, torch.inf, -torch.inf
    for one in SETTINGS:
        tokens = sample(logits, [one] * 4)
        assert tokens[:3] == [-1, -1, -1]
        assert tokens[3] >= 0


def test_a_token_does_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = list(SETTINGS) * 3
    logits = awkward("normal", len(settings), 20000, dtype=torch.bfloat16) * 2
    whole = sample(logits, settings)
    scored = sampling.logprobs(logits, torch.tensor(whole)[:, None], torch.ones(len(settings)), "megatron", 8192)
    order = torch.randperm(len(settings)).tolist()
    for variant in FAST_VARIANTS:
        use_variant(monkeypatch, variant, sampling, **KERNELS)
        for count in (1, 2):
            with threads(count):
                assert [sample(logits[i : i + 1], [settings[i]])[0] for i in range(9)] == whole[:9]
                assert sample(logits[order], [settings[i] for i in order]) == [whole[i] for i in order]
                for i in (0, 11):
                    ids = torch.tensor([[whole[i], 5]])
                    alone = sampling.logprobs(logits[i : i + 1], ids, torch.ones(1), "megatron", 8192)
                    assert same_bits(alone[0, :1], scored[i])


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    logits = torch.zeros(1, 5000)
    base = Setting(seed=123, position=456)
    tokens = {
        sample(logits, [one])[0] for one in (base, Setting(seed=124, position=456), Setting(seed=123, position=457))
    }
    assert len(tokens) == 3
    # The same token wins wherever it stands and whatever the others are, as long as its score is the largest.
    winner = sample(logits, [base])[0]
    fewer = torch.full((1, 5000), -torch.inf)
    fewer[0, winner] = fewer[0, (winner + 1) % 5000] = 0
    assert sample(fewer, [base]) == [winner]


def test_philox_is_the_published_generator() -> None:
    # Known answers of the Random123 distribution.
    ones = 0xFFFFFFFF
    assert [int(w) for w in oracle.philox4x32((0, 0, 0, 0), (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in oracle.philox4x32((ones,) * 4, (ones, ones))] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_samples_follow_the_distribution() -> None:
    """Chi-square of 20,000 draws of 12 tokens at fixed seeds; 31.3 is the 99.9 % quantile of 11 degrees of freedom."""
    draws, logits = 20000, torch.linspace(-1.5, 1.5, 12)
    columns = (torch.full((draws,), 0.8), torch.zeros(draws, dtype=torch.int32), torch.ones(draws), torch.zeros(draws))
    seeds, positions = torch.arange(draws) // 100, torch.arange(draws) % 100
    tokens = sampling.sample(logits.expand(draws, 12), *columns, seeds, positions)
    wanted = torch.softmax(logits / 0.8, 0) * draws
    assert ((tokens.bincount(minlength=12) - wanted).square() / wanted).sum() < 31.3
    # Control: a draw from a slightly other distribution is noticed.
    other = torch.softmax(logits / 0.9, 0) * draws
    assert ((tokens.bincount(minlength=12) - other).square() / other).sum() > 31.3


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_give_the_bits_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    temperatures = torch.tensor([1.0, 0.0, 0.7, 3.0])
    for vocabulary in VOCABULARIES:
        logits = awkward(kind, 4, vocabulary, dtype=dtype, seed=vocabulary) * (4 if kind == "normal" else 1)
        ids = torch.randint(0, vocabulary, (4, 3), generator=torch.Generator().manual_seed(1))
        for order, block in ORDERS:
            got = sampling.logprobs(logits, ids, temperatures, order, block)
            rows = zip(wide(logits), ids.tolist(), temperatures.tolist(), strict=True)
            want = np.stack([oracle.logprobs(row, chosen, t, order, block) for row, chosen, t in rows])
            assert same_bits(got, torch.from_numpy(want)), (vocabulary, order, block)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sums_give_the_bits_of_the_oracle(dtype: torch.dtype) -> None:
    most, temperatures = torch.tensor([9.0, 20.0, -1.0]), torch.tensor([1.0, 0.5, 0.0])  # -1 is below the largest logit
    for vocabulary, block in ((60, 1), (700, 100), (9000, 4096), (9000, 5000), (9000, 32768)):
        logits = awkward("normal", 3, vocabulary, dtype=dtype) * 3
        got = sampling.block_sumexp(logits, most, temperatures, block)
        rows = zip(wide(logits), most.tolist(), temperatures.tolist(), strict=True)
        want = np.stack([oracle.block_sumexp(row, m, t, block) for row, m, t in rows])
        assert same_bits(got, torch.from_numpy(want)), (vocabulary, block)


def test_logprobs_are_the_fold_of_the_block_sums() -> None:
    logits, temperature = awkward("normal", 2, 70000, dtype=torch.bfloat16), torch.tensor([1.0, 0.8])
    z = logits.float() / temperature[:, None]
    most, ids = z.amax(-1), torch.tensor([[3], [69999]])
    sums = sampling.block_sumexp(logits, most, temperature, 32768)
    total = (sums[:, 0] + sums[:, 1]) + sums[:, 2]
    want = -(torch.from_numpy(functions.log(total.numpy()))[:, None] - (z.gather(1, ids) - most[:, None]))
    assert same_bits(sampling.logprobs(logits, ids, temperature, "megatron", 32768), want)


@pytest.mark.parametrize("order", ["torch", "megatron"])
def test_no_less_accurate_than_torch(order: str) -> None:
    logits = awkward("normal", 8, 151936, dtype=torch.float32) * 3
    ids = torch.randint(0, 151936, (8, 500), generator=torch.Generator().manual_seed(0))
    exact = torch.log_softmax(logits.double(), -1).gather(1, ids)
    other = (torch.log_softmax(logits, -1).gather(1, ids) - exact).abs()
    error = (sampling.logprobs(logits, ids, torch.ones(8), order, 32768) - exact).abs()
    assert error.mean() <= other.mean()
    assert error.max() <= other.max()


def test_control_torch_is_close_and_not_the_same() -> None:
    logits = awkward("normal", 4, 151936, dtype=torch.float32) * 3
    ids = torch.arange(1000).expand(4, 1000)
    ours = sampling.logprobs(logits, ids, torch.ones(4), "torch", 1)
    other = torch.log_softmax(logits, -1)[:, :1000]
    assert torch.allclose(ours, other, atol=1e-4)
    assert not same_bits(ours, other)


def test_the_reference_samples_the_same_tokens() -> None:
    """exp and log differ in their last bits: a token may differ once in very many draws, and does not in these."""
    settings = list(SETTINGS)[:11]
    logits = awkward("normal", len(settings), 3000, dtype=torch.float32)
    columns = zip(*map(astuple, settings), strict=True)
    tensors = [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, COLUMN_DTYPES, strict=True)]
    assert sampling.sample(logits, *tensors).tolist() == reference.sample(logits, *tensors).tolist()


def test_functions_are_accurate() -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(-80, 0, 20000).astype(np.float32)
    relative = np.abs(functions.exp(x) / np.exp(x.astype(np.float64)) - 1)
    assert relative.max() < 1.1 * 2.0**-23
    y = np.exp(generator.uniform(-80, 80, 20000)).astype(np.float32)
    exact = np.log(y.astype(np.float64))
    assert (np.abs(functions.log(y) - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() < 1.1


def test_views_ids_and_empty_inputs() -> None:
    padded = awkward("normal", 3, 200, dtype=torch.bfloat16)
    logits, ids = padded[:, 3:133], torch.tensor([[0, 129, -1, 130], [1, 2, 3, 4], [5, 6, 7, 8]])
    ones = torch.ones(3)
    scored = sampling.logprobs(logits, ids, ones, "torch", 1)
    assert same_bits(scored, sampling.logprobs(logits.contiguous(), ids.T.contiguous().T, ones, "torch", 1))
    assert scored[0].isnan().tolist() == [False, False, True, True]  # ids outside of the vocabulary
    settings = [Setting(top_p=0.9, seed=i) for i in range(3)]
    assert sample(logits, settings) == sample(logits.contiguous(), settings)
    nothing = torch.empty(0)
    assert sampling.logprobs(logits[:0], ids[:0], nothing, "torch", 1).shape == (0, 4)
    assert sampling.logprobs(logits, ids[:, :0], ones, "torch", 1).shape == (3, 0)
    assert sampling.block_sumexp(logits[:0], nothing, nothing, 64).shape == (0, 3)
    assert sampling.sample(
        logits[:0], nothing, nothing.int(), nothing, nothing, nothing.long(), nothing.long()
    ).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    logits, ones, ids = torch.zeros(2, 8), torch.ones(2), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="is not one of torch, megatron"):
        sampling.logprobs(logits, ids, ones, "jax", 1)
    with pytest.raises(ValueError, match="block is 0"):
        sampling.logprobs(logits, ids, ones, "megatron", 0)
    with pytest.raises(ValueError, match="block is 0"):
        sampling.block_sumexp(logits, ones, ones, 0)
    with pytest.raises(ValueError, match=r"expected \[2,M\]"):
        sampling.logprobs(logits, ids[:1], ones, "torch", 1)
    with pytest.raises(ValueError, match=r"temperature is \[1\]"):
        sampling.logprobs(logits, ids, ones[:1], "torch", 1)
    with pytest.raises(TypeError, match="bfloat16 and float32"):
        sampling.logprobs(logits.half(), ids, ones, "torch", 1)
    with pytest.raises(TypeError, match=r"top_k: torch\.float32"):
        sampling.sample(logits, ones, ones, ones, ones, ids[:, 0], ids[:, 0])


def test_oracle_arithmetic_against_exact_fractions() -> None:
    """The oracle's own fused multiply-add, on products that cancel down to their last bits."""
    from fractions import Fraction

    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (-a * b * (1 + generator.integers(-2, 3, 2000) * 2.0**-24)).astype(np.float32)
    for got, *operands in zip(ieee.fma(a, b, c), a, b, c, strict=True):
        x, y, z = (Fraction(float(operand)) for operand in operands)
        exact = x * y + z
        neighbours = (np.nextafter(got, np.float32(-np.inf)), got, np.nextafter(got, np.float32(np.inf)))
        distances = [abs(Fraction(float(value)) - exact) for value in neighbours]
        assert min(distances) == distances[1]
