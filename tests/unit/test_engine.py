"""The engine against a model whose logits depend on every token of the context, read back from the cache.

Whatever the engine does (chunks, cached prefixes, preemption, neighbours, aborts), each request must come out exactly
as it does alone, and nothing may be left behind.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.buckets import Bucket, plan_buckets
from tokenspeed.engine.device import CpuDevice
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.flight import Flight
from tokenspeed.engine.graphs import DecodeGraphs
from tokenspeed.engine.inputs import HostArrays
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import PositionLogprobs, Request, SamplingParams
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.errors import RequestError
from tokenspeed.kernels.reference import sampling
from tokenspeed.loading.update import StagedWeights
from tokenspeed.numerics.weights import WeightsDigest
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 61
OPERATORS = SamplingOperators(sampling.sample, sampling.sample, sampling.logprobs)


class ApartArena:
    """Host and device memory of their own; whatever the host forgets to write is garbage."""

    def __init__(self, size: int) -> None:
        self.device = torch.full((size,), 0x55, dtype=torch.uint8)
        self._host = np.empty(size, dtype=np.uint8)

    def begin(self) -> tuple[int, np.ndarray]:
        self._host[:] = 0x5A
        return 0, self._host

    def upload(self, size: int) -> None:
        self.device[:size] = torch.from_numpy(self._host[:size].copy())


class ApartDevice(CpuDevice):
    """As far from a CPU as a CPU can be: nothing reaches the host unless it is read, nothing the device unless sent."""

    asynchronous = True

    def __init__(self) -> None:
        self.recordings = 0

    def arena(self, size: int) -> ApartArena:
        return ApartArena(size)

    def read(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        return super().record(run)


BUCKETS = (Bucket(1, 6), Bucket(3, 2), Bucket(3, 6))

MODES: dict[str, dict[str, Any]] = {
    "as on a CPU": {},
    "apart": {"apart": True},
    "ahead": {"apart": True, "ahead": True},
    "in buckets": {"apart": True, "decode_buckets": BUCKETS},
    "ahead in buckets": {"apart": True, "ahead": True, "decode_buckets": BUCKETS},
}


def make_engine(model: ContextModel | None = None, *, apart: bool = False, **options: Any) -> Engine:
    device = ApartDevice() if apart else None
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 96, "num_pages": 6, "eos_ids": (0,)}
    return Engine(model or ContextModel(VOCAB), OPERATORS, None, EngineOptions(**{**sizes, **options}), device=device)


def alone(request: Request, model: ContextModel | None = None) -> Result:
    """The request by itself, in one chunk, without a prefix cache."""
    engine = make_engine(model, max_num_seqs=1, max_num_batched_tokens=96, num_pages=6, prefix_caching=False)
    return run(engine, [request])[request.id]


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    updates: int = 0


def absorb(results: dict[str, Result], updates: list[Any]) -> None:
    for update in updates:
        result = results[update.id]
        assert result.finish_reason is None, "an update after the last one"
        result.token_ids += update.token_ids
        result.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            assert result.updates == 0
            result.prompt_logprobs = update.prompt_logprobs
        result.finish_reason, result.stop_reason = update.finish_reason, update.stop_reason
        result.updates += 1


def run(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    results = {request.id: Result() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        absorb(results, engine.step())
    return results


def request(name: str, prompt: list[int], seed: int = 0, **params: Any) -> Request:
    return Request(id=name, prompt=prompt, seed=seed, params=SamplingParams(**{"max_tokens": 8, **params}))


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0) and (
        stats.pages_idle + stats.pages_free == stats.pages_total
    )


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


def rows_of_nobody_get_a_slot(patch: pytest.MonkeyPatch) -> None:
    pad = HostArrays.pad

    def wrong(host: HostArrays, sequences: int) -> None:
        pad(host, sequences)
        host.slots[sequences:] = 0

    patch.setattr(HostArrays, "pad", wrong)


def tokens_are_fed_to_another_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "rows_of", lambda _, states: list(range(len(states)))[::-1])


def host_arrays_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    upload = ApartArena.upload
    patch.setattr(ApartArena, "upload", lambda arena, size: upload(arena, size // 2))


@pytest.mark.parametrize(
    "fault",
    [rows_of_nobody_get_a_slot, tokens_are_fed_to_another_row, host_arrays_are_not_sent],
    ids=lambda f: f.__name__,
)
def test_a_fault_in_buckets_and_flights_would_be_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls of the modes: each of these changes a token, or runs into what is not there."""
    requests = [request(str(i), [5 + i] * (3 + i), seed=i, max_tokens=20 - 7 * i, ignore_eos=True) for i in range(3)]
    expected = {each.id: alone(each).token_ids for each in requests}
    fault(monkeypatch)
    try:
        results = run(make_engine(num_pages=18, **MODES["ahead in buckets"]), requests)
    except (AssertionError, IndexError):
        return
    assert {name: result.token_ids for name, result in results.items()} != expected


def test_logprobs_that_are_read_later_are_the_same() -> None:
    requests = [request(str(i), [3, 4, 5 + i], seed=i, max_tokens=30, logprobs=0, ignore_eos=True) for i in range(3)]
    engine = make_engine(num_pages=18, **MODES["ahead in buckets"])
    results = run(engine, requests)
    assert engine.steps_ahead > 20
    for each in requests:
        assert results[each.id].logprobs == alone(each).logprobs
        assert len(results[each.id].logprobs) == 30


def test_a_flight_is_dropped_where_requests_change_under_it() -> None:
    """Preemption and new weights between two steps: the step in flight counts for nothing, and nothing is lost."""
    each = request("a", [3, 4, 5], seed=1, max_tokens=30, ignore_eos=True)
    engine = make_engine(num_pages=12, **MODES["ahead in buckets"])
    results = {"a": Result()}
    engine.add(each)
    for number in range(100):
        if number == 9:
            assert engine.preempt(["a"]) == 1
        if number == 17:
            engine.weights_changed("the same ones")
        if engine.has_work:
            absorb(results, engine.step())
    assert engine.stats().preemptions == 2
    assert results["a"].token_ids == alone(each).token_ids
    assert idle(engine)


def test_a_request_that_ends_in_flight_leaves_the_others_alone() -> None:
    requests = [request(str(i), [5 + i] * 20, seed=i, max_tokens=40, ignore_eos=True) for i in range(3)]
    expected = {each.id: alone(each).token_ids for each in requests}
    stopped = msgspec.structs.replace(
        requests[1], params=msgspec.structs.replace(requests[1].params, stop_token_ids=[expected["1"][5]])
    )
    engine = make_engine(num_pages=18, **MODES["ahead in buckets"])
    results = {name: Result() for name in expected}
    for each in (requests[0], stopped, requests[2]):
        engine.add(each)
    for number in range(100):
        if number == 20:
            assert engine.abort("2") is not None
        if engine.has_work:
            absorb(results, engine.step())
    assert results["0"].token_ids == expected["0"]
    assert results["1"].token_ids == expected["1"][: expected["1"].index(expected["1"][5]) + 1]
    assert results["2"].token_ids == expected["2"][: len(results["2"].token_ids)]
    assert len(results["2"].token_ids) > 5
    assert idle(engine)


def test_a_device_out_of_memory_fails_the_prompt_that_is_too_much() -> None:
    class Full(ContextModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            if len(batch.token_ids) > 20:
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return super().forward(batch)

    small = request("small", [1, 2, 3], max_tokens=20, ignore_eos=True)
    large = request("large", [4] * 30, max_tokens=20)
    engine = make_engine(Full(VOCAB), num_pages=18, max_num_batched_tokens=64, **MODES["ahead in buckets"])
    results = {"small": Result(), "large": Result()}
    engine.add(small)
    errors = []
    for number in range(60):
        if number == 5:
            engine.add(large)
        if engine.has_work:
            updates = engine.step()
            errors += [update.error for update in updates if update.error]
            absorb(results, updates)
    assert errors == ["out of memory: tried to allocate 2 GiB; the host is out of memory"]
    assert results["large"].finish_reason == "error"
    assert results["small"] == dataclasses.replace(alone(small), updates=results["small"].updates)
    assert idle(engine)


def test_new_weights_are_recorded_anew() -> None:
    device = ApartDevice()
    options = EngineOptions(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=96,
        num_pages=12,
        decode_buckets=(Bucket(1, 6), Bucket(2, 6)),
        ahead=True,
    )
    engine = Engine(ContextModel(VOCAB), OPERATORS, None, options, device=device)
    assert list(engine.warm_up()) == [(1, 3), (2, 3), (3, 3)]
    assert idle(engine)
    assert not any(tensor.any() for tensor in engine.cache_tensors())
    each = request("a", [3, 4, 5], seed=1, max_tokens=10, ignore_eos=True)
    assert run(engine, [each])["a"].token_ids == alone(each).token_ids
    assert (device.recordings, engine.replays) == (2, 9)
    other = ContextModel(VOCAB, favour=lambda context: torch.arange(VOCAB).float() + len(context) % 7)
    engine.install_weights(StagedWeights(other, WeightsDigest({})), "other")  # type: ignore[arg-type]
    again = request("b", [3, 4, 5], seed=1, max_tokens=10, ignore_eos=True)
    assert run(engine, [again])["b"].token_ids == alone(again, other).token_ids != alone(each).token_ids
    assert device.recordings == 3


def test_buckets_cover_every_decode_step() -> None:
    buckets = plan_buckets(200, 2560)
    assert buckets[0] == Bucket(200, 2560)
    assert {bucket.pages for bucket in buckets} == {64, 512, 2560}
    assert {bucket.rows for bucket in buckets} == {1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 200}
    assert plan_buckets(1, 10) == (Bucket(1, 10),)
    assert plan_buckets(2000, 64)[0] == Bucket(512, 64)
    graphs = DecodeGraphs(CpuDevice(), None, buckets, None)  # type: ignore[arg-type]
    assert graphs.find(3, 64) == Bucket(4, 64)
    assert graphs.find(3, 65) == Bucket(4, 512)
    assert graphs.find(193, 2560) == Bucket(200, 2560)
    assert graphs.find(201, 1) is None


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


def test_further_ids_are_scored_after_the_best() -> None:
    result = alone(request("a", [2, 3], seed=5, logprobs=2, logprob_token_ids=[7, 9], max_tokens=3, ignore_eos=True))
    whole = alone(request("a", [2, 3], seed=5, logprobs=20, max_tokens=3, ignore_eos=True))
    for entry, full in zip(result.logprobs, whole.logprobs, strict=True):
        assert [top.id for top in entry.top][2:] == [7, 9]
        assert entry.top[:2] == full.top[:2]
        known = {top.id: top for top in full.top}
        assert all(known.get(top.id, top) == top for top in entry.top)


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


def test_samples_differ_and_replay_by_their_seed() -> None:
    many = [request(str(i), [4, 4], seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    results = run(make_engine(num_pages=30), many)
    assert len({tuple(result.token_ids) for result in results.values()}) == 6
    replay = msgspec.structs.replace(many[3], id="again")
    assert alone(replay).token_ids == results["3"].token_ids
