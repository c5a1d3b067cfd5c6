"""n samples of a request = n requests with the derived seeds; a request without a seed shares one with nobody."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed import SamplingParams
from tokenspeed.engine.seeds import derive_seed
from tokenspeed.verify.items import float_bits


def reply(sample: Any) -> tuple[list[int], list[int]]:
    logprobs = [p[t].logprob for p, t in zip(sample.logprobs, sample.token_ids, strict=True)]
    return sample.token_ids, [float_bits(value) for value in logprobs]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_samples_are_single_requests(seed: int, llm: Any) -> None:
    params = SamplingParams(n=5, seed=seed, max_tokens=12, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([[9, 8, 7]], params)
    assert [sample.seed for sample in output.outputs] == [derive_seed(seed, i) for i in range(5)]
    for sample in output.outputs:
        single = SamplingParams(seed=sample.seed, max_tokens=12, logprobs=0, ignore_eos=True)
        (again,) = llm.generate([[9, 8, 7]], single)
        assert reply(again.outputs[0]) == reply(sample)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 5


def test_without_a_seed_all_differ_and_each_can_be_replayed(llm: Any) -> None:
    outputs = llm.generate([[4, 5, 6]] * 8, SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True))
    samples = [output.outputs[0] for output in outputs]
    assert len({sample.seed for sample in samples}) == len({tuple(sample.token_ids) for sample in samples}) == 8
    params = [SamplingParams(seed=s.seed, max_tokens=12, logprobs=0, ignore_eos=True) for s in samples]
    again = llm.generate([[4, 5, 6]] * 8, params)
    assert [reply(output.outputs[0]) for output in again] == [reply(sample) for sample in samples]


def test_seeded_among_unseeded(llm: Any) -> None:
    seeded = SamplingParams(seed=11, max_tokens=12, logprobs=0, ignore_eos=True)
    free = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
    (alone,) = llm.generate([[1, 2, 3]], seeded)
    mixed = llm.generate([[1, 2, 3]] * 8, [seeded, free] * 4)
    assert [reply(output.outputs[0]) for output in mixed[::2]] == [reply(alone.outputs[0])] * 4
    assert len({tuple(output.outputs[0].token_ids) for output in mixed}) == 5
