"""The reference sampling kernels do what their docstring says."""

from __future__ import annotations

import pytest
import torch
import transformers

from tokenspeed.kernels.reference.philox import gumbel, philox4x32, uniform
from tokenspeed.kernels.reference.sampling import block_sumexp, kept_ids, logprobs, sample

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_uniform_uses_every_part_of_its_counter() -> None:
    seed, position = 0x0123456789ABCDEF, 0x1_0000_0007
    words = philox4x32(
        (torch.tensor([2]), torch.tensor([0]), torch.tensor([7]), torch.tensor([1])),
        (torch.tensor([0x89ABCDEF]), torch.tensor([0x01234567])),
    )
    expected = [((int(word) >> 9) + 0.5) * 2.0**-23 for word in words]
    assert uniform(seed, position, torch.arange(8, 12)).tolist() == expected
    other = [uniform(seed + 2**32, position, torch.arange(8)), uniform(seed, 7, torch.arange(8))]
    assert not any(torch.equal(values, uniform(seed, position, torch.arange(8))) for values in other)


def test_uniform_of_a_negative_seed_is_that_of_its_64_bits() -> None:
    ids = torch.arange(16)
    assert torch.equal(uniform(-1, 3, ids), uniform(2**64 - 1, 3, ids))


def test_noise_is_never_infinite() -> None:
    values = gumbel(1, 1, torch.arange(200_000))
    assert torch.isfinite(values).all()
    assert abs(float(values.mean()) - 0.5772) < 0.01


def rows(logits: torch.Tensor, **settings: float | list[int]) -> list[int]:
    count = len(logits)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = settings.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * count, dtype=dtype)

    ids: list[int] = sample(
        logits,
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        column("seeds", 0, torch.int64),
        column("positions", 0, torch.int64),
    ).tolist()
    return ids


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [-torch.inf, -torch.inf, -3.0, -3.0]])
    assert rows(logits, temperature=0.0, top_p=0.1, top_k=1) == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_best_give_minus_one(temperature: float) -> None:
    bad = torch.tensor([[1.0, torch.nan, 0.0], [1.0, torch.inf, 0.0], [-torch.inf] * 3, [0.0, 1.0, -torch.inf]])
    assert rows(bad, temperature=temperature)[:3] == [-1, -1, -1]
    assert rows(bad, temperature=temperature)[3] in (0, 1)


def test_filters_keep_what_they_should() -> None:
    z = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept_ids(z, 2, 1.0, 0.0).tolist() == [1, 2]
    assert kept_ids(z, 5, 1.0, 0.0).tolist() == [0, 1, 2, 3, 4]
    assert kept_ids(z, 0, 0.0, 0.0).tolist() == [1]
    assert kept_ids(z, 0, 1.0, 1.0).tolist() == [1, 2, 3]
    assert kept_ids(z, 0, 1.0, 0.3).tolist() == [0, 1, 2, 3]
    # Of the two that top-k leaves each has half: 0.5 is reached by the first, 0.51 is not.
    assert kept_ids(z, 2, 0.5, 0.0).tolist() == [1]
    assert kept_ids(z, 2, 0.51, 0.0).tolist() == [1, 2]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(40, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (60, 0.7, 0.02)])
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    """On rows without ties, in transformers' order of top-k, top-p and min-p."""
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(3)) * 3
    scores = logits
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = transformers.MinPLogitsWarper(min_p)(None, scores)
    for row, kept in zip(logits, scores > -torch.inf, strict=True):
        assert kept_ids(row, top_k, top_p, min_p).tolist() == kept.nonzero().flatten().tolist()


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).repeat(3000, 1)
    ids = torch.tensor(rows(logits, temperature=0.8, positions=list(range(3000)), seeds=[42] * 3000))
    observed = torch.bincount(ids, minlength=5) / len(ids)
    assert torch.allclose(observed, torch.softmax(logits[0] / 0.8, -1), atol=0.02)


def test_a_row_is_a_function_of_itself() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    seeds, positions = [5, 6, 7, 8, 9, 10], [100, 3, 100, 7, 2**33, 0]
    together = rows(logits, seeds=seeds, positions=positions, top_k=50, top_p=0.9)
    for i in reversed(range(6)):
        alone = rows(logits[i : i + 1], seeds=seeds[i : i + 1], positions=positions[i : i + 1], top_k=50, top_p=0.9)
        assert alone == together[i : i + 1]
    assert together != rows(logits, seeds=seeds, positions=[p + 1 for p in positions], top_k=50, top_p=0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["torch", "megatron"])
def test_logprobs(order: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0])
    ids = torch.tensor([[0, 999], [1, -1], [500, 2], [-7, 3]])
    out = logprobs(logits, ids, temperature, order, 256)
    divisor = torch.tensor([1.0, 1.0, 0.5, 2.0], dtype=torch.float64).unsqueeze(-1)
    exact = torch.log_softmax(logits.double() / divisor, -1).gather(-1, ids.clamp_min(0)).float()
    assert torch.equal(torch.isnan(out), ids < 0)
    assert torch.allclose(out[ids >= 0], exact[ids >= 0], rtol=1e-5, atol=1e-5)


def test_logprobs_refuses_another_order() -> None:
    with pytest.raises(ValueError, match="megatron"):
        logprobs(torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), "vllm", 4)


def test_last_block_may_be_short() -> None:
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(6))
    sums = block_sumexp(logits, logits.amax(-1), torch.ones(2), 32)
    terms = torch.exp(logits - logits.amax(-1, keepdim=True))
    expected = torch.stack([terms[:, :32].sum(-1), terms[:, 32:64].sum(-1), terms[:, 64:].sum(-1)], -1)
    assert sums.shape == (2, 3)
    assert torch.allclose(sums, expected)


def test_no_rows() -> None:
    none = torch.empty(0, 50)
    assert rows(none) == []
    empty = torch.empty(0, dtype=torch.int64).view(0, 1)
    assert logprobs(none, empty, torch.empty(0), "megatron", 32).shape == (0, 1)
