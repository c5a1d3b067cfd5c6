"""Steps in buckets and steps in flight: neither recording a step nor issuing it ahead changes what a request gets.

The device is one where nothing reaches the host unless it is read, and nothing the device unless it is sent.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable

import msgspec
import pytest
import torch

from engine_support import (
    MODES,
    OPERATORS,
    VOCAB,
    ApartArena,
    ApartDevice,
    Result,
    absorb,
    alone,
    idle,
    make_engine,
    request,
    run,
)
from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.buckets import Bucket, plan_buckets
from tokenspeed.engine.device import CpuDevice
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.flight import Flight
from tokenspeed.engine.graphs import DecodeGraphs
from tokenspeed.engine.inputs import HostArrays
from tokenspeed.engine.options import EngineOptions
from tokenspeed.loading.update import StagedWeights
from tokenspeed.numerics.weights import WeightsDigest
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")


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


class Watched(CpuDevice):
    """Notes, whenever memory is given back, whether `held` is still there."""

    def __init__(self) -> None:
        self.held: Callable[[], object] = lambda: None
        self.found: list[object] = []

    def reclaim(self) -> str:
        self.found.append(self.held())
        return "told"


def test_what_a_step_without_memory_had_allocated_is_free_when_memory_is_told() -> None:
    device = Watched()

    class Full(ContextModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            allocated = torch.zeros(1000)
            device.held = weakref.ref(allocated)
            if len(batch.token_ids) == 1 and self.is_full:
                raise torch.OutOfMemoryError("tried to allocate 2 GiB")
            return super().forward(batch)

        is_full = False

    options = EngineOptions(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=96, num_pages=12, ahead=True)
    model = Full(VOCAB)
    engine = Engine(model, OPERATORS, None, options, device=device)
    engine.add(request("a", [3, 4, 5], seed=1, max_tokens=10, ignore_eos=True))
    engine.step()
    model.is_full = True
    gc.disable()
    try:
        errors = [update.error for _ in range(4) if engine.has_work for update in engine.step()]
    finally:
        gc.enable()
    assert errors[-1] == "out of memory: tried to allocate 2 GiB; told"
    # The step that was issued ahead, and the same one when it came again.
    assert device.found == [None, None]


def test_steps_of_the_given_sizes_are_computed_for_nobody() -> None:
    """The largest with the widest page tables, and every operator that a step may call."""
    calls: list[tuple[int, ...]] = []

    class Noted(ContextModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            assert not batch.query_starts.any()
            calls.append((len(batch.token_ids), *batch.page_tables.shape, len(batch.logits_rows)))
            return super().forward(batch)

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append((len(hidden),))
            return super().compute_logits(hidden)

    def sample(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
        assert logits.dtype == torch.float32
        calls.append(tuple(logits.shape))
        return OPERATORS.sample(logits, *columns)

    operators = dataclasses.replace(OPERATORS, sample_edited=sample)
    options = EngineOptions(
        max_num_seqs=4, max_num_batched_tokens=200, max_model_len=2000, num_pages=130, warm_up_tokens=(1, 65, 300)
    )
    engine = Engine(Noted(VOCAB), operators, None, options, device=ApartDevice())
    assert list(engine.warm_up()) == [(1, 3), (2, 3), (3, 3)]
    assert calls == [
        *[(200, 4, 125, 4), (64,), (4,), (4, VOCAB)],
        *[(65, 4, 64, 4), (64,), (4,), (4, VOCAB)],
        *[(1, 1, 64, 1), (1,), (1,), (1, VOCAB)],
    ]


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
    graphs = DecodeGraphs(CpuDevice(), None, buckets)  # type: ignore[arg-type]
    assert graphs.find(3, 64) == Bucket(4, 64)
    assert graphs.find(3, 65) == Bucket(4, 512)
    assert graphs.find(193, 2560) == Bucket(200, 2560)
    assert graphs.find(201, 1) is None
