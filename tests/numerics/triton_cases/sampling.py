"""exp, log, noise, log-probabilities and sampling: the bits of the oracle, which are the CPU kernels'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from oracle import functions
from oracle import sampling as oracle
from tokenspeed_kernels_aok.triton import logprobs, noise, sample
from triton_cases.support import (
    DEVICE,
    THOROUGH,
    assert_rows_do_not_depend_on_the_batch,
    float_bits,
    random,
    same_bits,
)

VOCABULARY = 4200  # more than one piece, and not a multiple of anything


@triton.jit
def _functions_kernel(x, exps, logs, N: tl.constexpr):
    lane = tl.arange(0, N)
    values = tl.load(x + lane)
    tl.store(exps + lane, noise.exp(values))
    tl.store(logs + lane, noise.log(values))


def test_exp_and_log_have_the_bits_of_the_oracle() -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 88.8, -87.5, -87.3, 128.0, 2.0**-126])
    x = torch.cat([special.to(DEVICE), random(4096 - len(special)) * 30])
    exps, logs = torch.empty_like(x), torch.empty_like(x)
    _functions_kernel[(1,)](x, exps, logs, N=4096, enable_fp_fusion=False)
    assert np.array_equal(float_bits(exps), float_bits(functions.exp(x.cpu().numpy())))
    assert np.array_equal(float_bits(logs), float_bits(functions.log(x.cpu().numpy())))


@triton.jit
def _noise_kernel(out, seed_and_position, first, N: tl.constexpr):
    seed = tl.load(seed_and_position)
    position = tl.load(seed_and_position + 1)
    tl.store(out + tl.arange(0, N), noise.gumbel(first, seed, position, N))


@pytest.mark.parametrize(("seed", "position"), [(7, 0), (2**63 - 5, 2**33 + 17), (-3, 5), (0, 1)])
def test_noise_has_the_bits_of_the_oracle(seed: int, position: int) -> None:
    out = torch.empty(4096, device=DEVICE)
    where = torch.tensor([seed, position], device=DEVICE)
    _noise_kernel[(1,)](out, where, 8192, N=4096, enable_fp_fusion=False)
    expected = oracle.gumbel(seed, position, np.arange(8192, 8192 + 4096))
    assert np.array_equal(float_bits(out), float_bits(expected))
    assert len(np.unique(expected)) > 4000


@pytest.mark.parametrize(
    ("dtype", "order", "block"),
    [(torch.bfloat16, "torch", 32768), (torch.bfloat16, "megatron", 32768), (torch.float32, "megatron", 1500)],
)
def test_logprobs_have_the_bits_of_the_oracle(dtype: torch.dtype, order: str, block: int) -> None:
    logits = (random(3, VOCABULARY) * 4).to(dtype)
    temperature = torch.tensor([0.0, 1.0, 0.7], device=DEVICE)
    ids = torch.tensor([[0, 4199, 17], [5, 5, 4100], [1, 2, 3]], device=DEVICE)
    out = logprobs.logprobs(logits, ids, temperature, order, block)
    sums = None
    if order == "megatron":
        sums = logprobs.block_sumexp(logits, torch.full((3,), 20.0, device=DEVICE), temperature, block)
    for row in range(3):
        wide, heat = logits[row].float().cpu().numpy(), float(temperature[row])
        expected = oracle.logprobs(wide, ids[row].tolist(), heat, order, block)
        assert np.array_equal(float_bits(out[row]), float_bits(expected))
        if sums is not None:
            assert np.array_equal(float_bits(sums[row]), float_bits(oracle.block_sumexp(wide, 20.0, heat, block)))


def test_ids_outside_the_vocabulary_and_unknown_orders() -> None:
    logits, temperature = random(1, 100), torch.ones(1, device=DEVICE)
    ids = torch.tensor([[-1, 100, 99]], device=DEVICE)
    assert logprobs.logprobs(logits, ids, temperature, "torch", 32768).isnan().tolist() == [[True, True, False]]
    with pytest.raises(ValueError, match="'fast' is not one of torch, megatron"):
        logprobs.logprobs(logits, ids, temperature, "fast", 32768)


def test_logprob_rows_do_not_depend_on_the_batch() -> None:
    def run(rows: torch.Tensor) -> torch.Tensor:
        ids = torch.full((len(rows), 1), 7, device=DEVICE)
        block = 96 if THOROUGH else 32768
        return logprobs.logprobs(rows, ids, torch.ones(len(rows), device=DEVICE), "megatron", block)

    assert_rows_do_not_depend_on_the_batch(run, random(16, 150, dtype=torch.bfloat16))


FILTERS = [
    # temperature, top_k, top_p, min_p
    (0.0, 5, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.0, 40, 0.8, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (2.0, 0, 1.0, 0.3),
    (1.0, VOCABULARY, 0.999, 0.0),
]


def _columns(count: int) -> list[torch.Tensor]:
    rows = [FILTERS[i % len(FILTERS)] for i in range(count)]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [
        torch.tensor(column, dtype=dtype, device=DEVICE)
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, len(FILTERS)), (torch.float32, 5)])
def test_sampled_tokens_are_those_of_the_oracle(dtype: torch.dtype, count: int) -> None:
    """bf16 logits have many exact ties, which the filters must cut by id."""
    logits = (random(count, VOCABULARY) * 3).to(dtype)
    seeds = torch.arange(count, device=DEVICE) * 2**40 - 3
    positions = torch.arange(count, device=DEVICE) * 1000
    out = sample.sample(logits, *_columns(count), seeds, positions)
    expected = [
        oracle.sample(logits[i].float().cpu().numpy(), *FILTERS[i], int(seeds[i]), int(positions[i]))
        for i in range(count)
    ]
    assert out.tolist() == expected
    assert len(set(expected)) > 3


def test_ties_and_rows_without_a_finite_best() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[1, nan, 2], [-inf, -inf, -inf], [1, inf, 0], [-1.0, -0.0, 0.0]], device=DEVICE)
    zeros = torch.zeros(4, device=DEVICE)
    whole = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    out = sample.sample(logits, zeros, zeros.int(), zeros + 1, zeros, whole, whole)
    assert out.tolist() == [-1, -1, -1, 1]


def test_a_sampled_row_does_not_depend_on_the_batch() -> None:
    logits = random(9, 300, dtype=torch.bfloat16) * 2
    columns = _columns(9)
    seeds, positions = torch.arange(9, device=DEVICE), torch.arange(9, device=DEVICE) + 9
    batch = sample.sample(logits, *columns, seeds, positions)
    for size in (1, 2, 7, 8) if THOROUGH else (1, 8):
        part = sample.sample(*(each[:size] for each in (logits, *columns, seeds, positions)))
        assert same_bits(part, batch[:size])
    shifted = sample.sample(*(each[6:] for each in (logits, *columns, seeds, positions)))
    assert same_bits(shifted, batch[6:])
    other_seed = sample.sample(*(each[7:8] for each in (logits, *columns, seeds + 1, positions)))
    assert not same_bits(other_seed, batch[7:8])
