"""The engine against a model whose logits depend on every token of the context, read back from the cache.

Whatever the engine does (chunks, cached prefixes, preemption, neighbours, aborts), each request must come out exactly
as it does alone, and nothing may be left behind.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_support import MODES, VOCAB, Result, absorb, alone, idle, make_engine, request, run
from tokenspeed.engine.request import Request
from tokenspeed.errors import RequestError
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    base = draw(st.lists(st.integers(1, VOCAB - 1), min_size=48, max_size=48))
    found = []
    for i in range(draw(st.integers(1, 7))):
        shared = draw(st.integers(0, 48))
        own = draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20))
        params = {
            "max_tokens": draw(st.integers(0, 26)),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "logprobs": draw(st.sampled_from([None, 0, 3])),
            "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.5])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.2])),
        }
        found.append(request(str(i), base[:shared] + own, seed=draw(st.integers(0, 3)), **params))
    return found


@settings(max_examples=60, deadline=None)
@given(requests=workloads(), budget=st.integers(4, 40), pages=st.integers(6, 12), data=st.data())
def test_every_request_comes_out_as_alone_and_nothing_is_left(
    requests: list[Request], budget: int, pages: int, data: st.DataObject
) -> None:
    mode = MODES[data.draw(st.sampled_from(sorted(MODES)))]
    engine = make_engine(max_num_batched_tokens=budget, num_pages=pages, **mode)
    results = {each.id: Result() for each in requests}
    pending = list(requests)
    aborted: set[str] = set()
    while pending or engine.has_work:
        action = data.draw(st.sampled_from(["step", "step", "add", "preempt", "abort"]))
        live = [state for state in results if results[state].finish_reason is None and state not in aborted]
        if action == "add" and pending:
            engine.add(pending.pop(0))
        elif action == "preempt" and live:
            engine.preempt([data.draw(st.sampled_from(live))])
        elif action == "abort" and live and len(aborted) < 1:
            name = data.draw(st.sampled_from(live))
            if engine.abort(name) is not None:
                aborted.add(name)
        elif engine.has_work:
            absorb(results, engine.step())
        elif pending:
            engine.add(pending.pop(0))
        stats = engine.stats()
        assert stats.pages_used + stats.pages_idle + stats.pages_free == stats.pages_total
    assert idle(engine)
    for each in requests:
        if each.id not in aborted:
            expected = alone(each)
            expected.updates = results[each.id].updates
            assert results[each.id] == expected


@pytest.mark.parametrize("mode", MODES)
def test_the_mechanisms_happen(mode: str) -> None:
    """Chunks, cached prefixes and preemption all occur in one run, and change nothing."""
    rng = random.Random(3)
    base = [rng.randrange(1, VOCAB) for _ in range(40)]
    requests = [
        request(str(i), base + [rng.randrange(1, VOCAB) for _ in range(6)], seed=i, max_tokens=40, ignore_eos=True)
        for i in range(8)
    ]
    model = ContextModel(VOCAB)
    engine = make_engine(model, num_pages=12, max_num_batched_tokens=16, **MODES[mode])
    results = run(engine, requests)
    assert bool(engine.replays) == ("buckets" in mode)
    assert bool(engine.steps_ahead) == ("ahead" in mode)
    stats = engine.stats()
    assert stats.preemptions >= 1
    assert stats.cached_tokens > 0
    assert stats.chunked_prefills > 0
    assert model.largest_batch > 1
    for each in requests:
        assert results[each.id].token_ids == alone(each).token_ids
    assert idle(engine)


def test_a_fault_of_the_cache_would_be_seen() -> None:
    """Negative control: with one stale slot the output differs, so the equalities above mean something."""
    each = request("a", list(range(1, 40)), temperature=0.0)
    engine = make_engine()
    for key in engine.cache_tensors():
        assert not key.any()
    engine.add(each)
    results = {"a": Result()}
    while engine.has_work:
        absorb(results, engine.step())
        engine.cache_tensors()[0].view(-1)[16 * 5 + 3] += 1  # pages are handed out from 0 on; this one gets used
        engine.cache_tensors()[0].view(-1)[3] += 1
    assert results["a"].token_ids != alone(each).token_ids


def test_first_come_first_served_and_nobody_starves() -> None:
    engine = make_engine(num_pages=6, max_num_seqs=2, max_num_batched_tokens=2)
    requests = [request(str(i), [i + 1] * 40, max_tokens=5, ignore_eos=True) for i in range(5)]
    for each in requests:
        engine.add(each)
    order = []
    while engine.has_work:
        order += [update.id for update in engine.step() if update.finish_reason]
    assert order == sorted(order)


def test_nan_ends_one_request_only() -> None:
    def favour(context: np.ndarray) -> torch.Tensor | None:
        return torch.full((VOCAB,), torch.nan) if context[0] == 9 and len(context) > 20 else None

    model = ContextModel(VOCAB, favour=favour)
    good = request("good", [1] * 18, max_tokens=20, ignore_eos=True)
    bad = request("bad", [9] * 18, max_tokens=20, ignore_eos=True)
    scored = request("scored", [9] * 30, max_tokens=0, prompt_logprobs=0)
    engine = make_engine(model, num_pages=18)
    results = run(engine, [bad, good, scored])
    assert results["bad"].finish_reason == "error"
    assert len(results["bad"].token_ids) == 3
    assert results["scored"].finish_reason == "error"
    assert results["good"] == alone(good, ContextModel(VOCAB))
    assert idle(engine)


def test_abort_frees_everything_at_once() -> None:
    engine = make_engine(num_pages=12)
    for name in "abc":
        engine.add(request(name, [1] * 30, max_tokens=50, ignore_eos=True))
    for _ in range(12):
        engine.step()
    assert engine.stats().running > 0
    last = engine.abort("a")
    assert last is not None
    assert last.finish_reason == "abort"
    assert engine.abort("a") is None
    engine.abort("b")
    engine.abort("c")
    assert idle(engine)
    assert not engine.has_work


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", [2]))
    engine.abort("a")
    engine.add(request("a", [2]))


def test_new_weights_recompute_what_runs_and_share_nothing() -> None:
    engine = make_engine(num_pages=12)
    run(engine, [request("warm", [1] * 40)])
    each = request("a", [1] * 40, max_tokens=20, ignore_eos=True)
    results = {"a": Result()}
    engine.add(each)
    for _ in range(4):
        absorb(results, engine.step())
    before = engine.stats()
    engine.weights_changed("two")
    assert (engine.stats().pages_idle, engine.stats().pages_used) == (0, 0)
    while engine.has_work:
        updates = engine.step()
        assert {update.weight_version for update in updates} <= {"two"}
        absorb(results, updates)
    assert engine.stats().preemptions == before.preemptions + 1
    assert engine.stats().cached_tokens == before.cached_tokens
    assert results["a"].token_ids == alone(each).token_ids


def test_new_weights_start_prompt_logprobs_again() -> None:
    model = ContextModel(VOCAB)
    engine = make_engine(model, num_pages=12)
    each = request("a", [1] * 40, max_tokens=0, prompt_logprobs=0)
    results = {"a": Result()}
    engine.add(each)
    engine.step()
    other = ContextModel(VOCAB, favour=lambda context: torch.arange(VOCAB) * float(len(context)))
    model.logits_of = other.logits_of  # type: ignore[method-assign]
    engine.weights_changed("two")
    while engine.has_work:
        absorb(results, engine.step())
    assert results["a"].prompt_logprobs == alone(each, other).prompt_logprobs
    assert results["a"].prompt_logprobs != alone(each).prompt_logprobs
