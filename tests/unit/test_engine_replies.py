"""What one request gets: where it stops, its seed, its penalties and its logprobs, against plain computations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_support import VOCAB, Result, alone, make_engine, request, run
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")


def test_stop_tokens_min_tokens_and_lengths() -> None:
    def always_eos(context: np.ndarray) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[0], logits[7], logits[8] = 9.0, 8.0, 7.0
        return logits

    model = ContextModel(VOCAB, favour=always_eos)

    def one(**params: Any) -> Result:
        return alone(request("a", [3], temperature=0.0, **params), model)

    assert (one().token_ids, one().finish_reason, one().stop_reason) == ([0], "stop", None)
    assert one(ignore_eos=True).token_ids == [0] * 8
    assert one(ignore_eos=True).finish_reason == "length"
    assert one(ignore_eos=True, stop_token_ids=[0]).stop_reason == 0
    assert one(min_tokens=3).token_ids == [7, 7, 7, 0]
    assert one(min_tokens=3, stop_token_ids=[7]).token_ids == [8, 8, 8, 0]
    assert one(min_tokens=3, stop_token_ids=[7], ignore_eos=True).token_ids == [0] * 8
    assert len(one(max_tokens=None, ignore_eos=True).token_ids) == 95
    assert one(allowed_token_ids=[5, 6]).token_ids == [5] * 8
    assert one(logit_bias={9: 50.0}, ignore_eos=True).token_ids == [9] * 8
    # Ids that the model has no logits for end nothing, and mask nothing.
    wild = make_engine(model, eos_ids=(0, -VOCAB + 7, VOCAB, 2**70))
    asked = request("a", [3], temperature=0.0, min_tokens=3)
    assert run(wild, [asked])["a"].token_ids == [7, 7, 7, 0]


def test_samples_differ_and_replay_by_their_seed() -> None:
    many = [request(str(i), [4, 4], seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    results = run(make_engine(num_pages=30), many)
    assert len({tuple(result.token_ids) for result in results.values()}) == 6
    replay = msgspec.structs.replace(many[3], id="again")
    assert alone(replay).token_ids == results["3"].token_ids


def test_penalties_against_a_plain_computation() -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.7,
        "temperature": 0.0,
    }
    prompt = [3, 3, 4, 9]
    got = alone(request("a", prompt, max_tokens=40, ignore_eos=True, **params)).token_ids
    model, tokens = ContextModel(VOCAB), list(prompt)
    for _ in range(40):
        logits = model.logits_of(np.array(tokens))
        counts = Counter(tokens[len(prompt) :])
        for token in set(tokens):
            value = logits[token]
            value = value / 1.3 if value > 0 else value * 1.3
            logits[token] = value - 0.4 * counts[token] - 0.7 * (counts[token] > 0)
        tokens.append(int(logits.argmax()))
    assert got == tokens[len(prompt) :]


def test_logprobs_and_ranks_against_a_plain_computation() -> None:
    each = request("a", [2, 3], seed=5, logprobs=4, max_tokens=12, ignore_eos=True, temperature=0.7)
    result = alone(each)
    tokens = [2, 3]
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        logits = ContextModel(VOCAB).logits_of(np.array(tokens))
        order = sorted(range(VOCAB), key=lambda i: (-float(logits[i]), i))
        values = torch.log_softmax(logits / torch.tensor(0.7), -1)
        assert (entry.token.id, entry.token.rank) == (token, order.index(token) + 1)
        assert [top.id for top in entry.top] == order[:4]
        assert [top.logprob for top in entry.top] == [float(values[i]) for i in order[:4]]
        tokens.append(token)


def test_further_ids_are_scored_after_the_best() -> None:
    result = alone(request("a", [2, 3], seed=5, logprobs=2, logprob_token_ids=[7, 9], max_tokens=3, ignore_eos=True))
    whole = alone(request("a", [2, 3], seed=5, logprobs=20, max_tokens=3, ignore_eos=True))
    for entry, full in zip(result.logprobs, whole.logprobs, strict=True):
        assert [top.id for top in entry.top][2:] == [7, 9]
        assert entry.top[:2] == full.top[:2]
        known = {top.id: top for top in full.top}
        assert all(known.get(top.id, top) == top for top in entry.top)


def test_prompt_logprobs_are_those_of_generation() -> None:
    first = alone(request("a", [5, 6, 7], seed=4, max_tokens=30, logprobs=0, ignore_eos=True))
    engine = make_engine()
    warm = request("w", [5, 6, 7, *first.token_ids], max_tokens=1)
    again = request("s", [5, 6, 7, *first.token_ids], max_tokens=0, prompt_logprobs=0)
    run(engine, [warm])
    cached_before = engine.stats().cached_tokens
    scored = run(engine, [again])["s"]
    assert engine.stats().cached_tokens == cached_before
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert scored.prompt_logprobs[3:] == first.logprobs
    assert scored.finish_reason == "length"
    assert scored.token_ids == []
