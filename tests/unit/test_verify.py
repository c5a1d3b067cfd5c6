"""The harness itself: it sees every kind of difference, refuses to prove nothing, and says what broke."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.verify.endpoint import EndpointError, outcome_of
from tokenspeed.verify.harness import judge
from tokenspeed.verify.items import (
    Item,
    Outcome,
    bits_float,
    first_difference,
    float_bits,
    make_item,
    make_items,
    result_digest,
)
from tokenspeed.verify.report import DIFFERENCES_KEPT, Report
from tokenspeed.verify.scenario import Check, Trial
from tokenspeed.verify.scenarios import SCENARIOS
from tokenspeed.verify.served import SERVED

ITEM = make_item("item", [1, 2, 3], 5, 3)
REPLY = Outcome((7, 8, 9), (float_bits(-1.0), float_bits(-2.0), float_bits(-3.0)), finish_reason="length")


@given(st.floats(width=32, allow_nan=False))
def test_float_bits_are_those_of_fp32(value: float) -> None:
    assert float_bits(value) == int(np.float32(value).view(np.uint32))
    assert bits_float(float_bits(value)) == value


def test_zeros_of_both_signs_and_infinity_are_told_apart() -> None:
    assert len({float_bits(value) for value in (0.0, -0.0, math.inf, -math.inf)}) == 4


@pytest.mark.parametrize(
    ("got", "what", "position"),
    [
        (Outcome((7, 8, 1), REPLY.bits, finish_reason="length"), "token", 5),
        (Outcome(REPLY.token_ids, (*REPLY.bits[:2], REPLY.bits[2] ^ 1), finish_reason="length"), "logprob", 5),
        (Outcome((7, 8), REPLY.bits[:2], finish_reason="length"), "length", 5),
        (Outcome(REPLY.token_ids, REPLY.bits, finish_reason="stop"), "length", 6),
        (Outcome(REPLY.token_ids, (), finish_reason="length"), "length", 6),
        (Outcome(REPLY.token_ids, REPLY.bits, (1,), finish_reason="length"), "length", 6),
    ],
)
def test_a_difference_is_found_at_its_place(got: Outcome, what: str, position: int) -> None:
    found = first_difference(ITEM, REPLY, got)
    assert found is not None
    assert (found.what, found.position) == (what, position)
    assert first_difference(ITEM, REPLY, REPLY) is None


def test_prompt_logprobs_and_alternatives_are_compared() -> None:
    prompt = [Outcome(prompt_bits=(1, 2)), Outcome(prompt_bits=(1, 3))]
    found = first_difference(ITEM, *prompt)
    assert found is not None
    assert (found.what, found.position) == ("prompt logprob", 2)
    item = ITEM.but("two alternatives", logprobs=2)
    tops = [((4, 1, 1), (5, 2, 2), (4, 1, 1), (5, 2, 2), (4, 1, 1), (6, 2, 2)), ((4, 1, 1), (5, 2, 2)) * 3]
    found = first_difference(item, *(Outcome(REPLY.token_ids, REPLY.bits, alternatives=top) for top in tops))
    assert found is not None
    assert (found.what, found.position) == ("alternative", 5)


def trial(got: Outcome = REPLY, **evidence: int) -> Trial:
    return Trial([Check(ITEM, REPLY, got)], Counter(evidence))


def test_what_holds_holds() -> None:
    result = judge("name", "states", {"seen": 2}, [trial(seen=1), trial(seen=1)])
    assert (result.verdict, result.compared, result.tokens) == ("holds", 2, 6)


def test_a_scenario_without_proof_is_vacuous_whatever_it_compared() -> None:
    result = judge("name", "states", {"preemptions": 4}, [trial(preemptions=3)])
    assert result.verdict == "vacuous"
    assert result.missing == ["preemptions 3 of 4"]


def test_a_scenario_that_compares_nothing_is_vacuous() -> None:
    assert judge("name", "states", {}, []).verdict == "vacuous"
    assert not Report("", "", "", []).holds


def test_a_difference_outweighs_missing_proof_and_is_located_once() -> None:
    asked: list[Check] = []
    wrong = trial(Outcome((7, 8, 1), REPLY.bits, finish_reason="length"))
    result = judge(
        "name", "states", {"never": 1}, [wrong] * 9, locate=lambda check: asked.append(check) or "over there"
    )
    assert (result.verdict, result.differing, len(result.findings), len(asked)) == ("differs", 9, DIFFERENCES_KEPT, 1)
    assert "over there" in result.findings[0].describe()


def test_an_exception_is_a_failure_with_its_words() -> None:
    def broken() -> Iterator[Trial]:
        yield trial()
        raise RuntimeError("no more pages")

    result = judge("name", "states", {}, broken())
    assert (result.verdict, result.error) == ("failed", "RuntimeError: no more pages")


def test_every_scenario_must_prove_something() -> None:
    assert all(scenario.proof for scenario in (*SCENARIOS.values(), *SERVED))
    assert len({scenario.states for scenario in SCENARIOS.values()}) == len(SCENARIOS)


def test_items_are_the_same_everywhere_and_fit() -> None:
    items = make_items(50, vocab_size=100, longest=64, output_tokens=16)
    again = make_items(50, vocab_size=100, longest=64, output_tokens=16)
    assert [item.key for item in items] == [item.key for item in again]
    assert all(len(item.prompt) + (item.params.max_tokens or 0) <= 64 for item in items)
    assert len({item.seed for item in items}) == 50


def test_a_result_digest_is_of_the_replies_and_not_of_their_order() -> None:
    pairs: list[tuple[Item, Outcome]] = [(ITEM.but(name), REPLY) for name in "ab"]
    assert result_digest(pairs) == result_digest(reversed(pairs))
    changed = Outcome(REPLY.token_ids, (*REPLY.bits[:2], REPLY.bits[2] ^ 1))
    assert result_digest([pairs[0], (pairs[1][0], changed)]) != result_digest(pairs)


def choice(**changes: Any) -> dict[str, Any]:
    logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-1.5]}
    return {"finish_reason": "length", "logprobs": {**logprobs, **changes}}


def test_a_reply_of_a_server_is_read_by_ids() -> None:
    outcome = outcome_of(choice(), {"prompt_tokens_details": {"cached_tokens": 16}})
    assert (outcome.token_ids, outcome.bits, outcome.cached_tokens) == ((7,), (float_bits(-1.5),), 16)


@pytest.mark.parametrize("reply", [choice(tokens=["hello"]), {"logprobs": None}, choice(token_logprobs=None)])
def test_a_reply_that_cannot_be_compared_is_an_error(reply: dict[str, Any]) -> None:
    with pytest.raises(EndpointError):
        outcome_of(reply, {})
