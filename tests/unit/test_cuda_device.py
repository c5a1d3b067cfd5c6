"""`CudaDevice` against a CUDA that is made up: which calls it makes, in which order, and an engine over it.

This shows that the code runs and waits where it must. It says nothing about a GPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.device import CudaDevice, apply_settings, open_device
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.errors import ConfigError
from tokenspeed.kernels.reference import sampling
from tokenspeed.numerics.settings import GpuSettings
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")

Log = list[str]


class Recorded(CudaDevice):
    """What was recorded runs again, since a made-up graph cannot replay."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return run


@pytest.fixture
def thread() -> dict[str, int]:
    """What CUDA keeps for a thread: its current device."""
    return {"device": 0}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, thread: dict[str, int]) -> Log:
    """Stands in for `torch.cuda`; returns the log of what was called."""
    log: Log = []

    class Event:
        def record(self) -> None:
            log.append("record event")

        def synchronize(self) -> None:
            log.append("wait for event")

    class Stream:
        def __init__(self) -> None:
            self.number = next(streams)

        def wait_stream(self, _other: object) -> None:
            log.append("wait for stream")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        log.append(f"begin {what}")
        try:
            yield
        finally:
            log.append(f"end {what}")

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **more: make(*args, **more)  # noqa: ARG005

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, thread["device"] = thread["device"], index
        log.append(f"enter device {index}")
        yield
        thread["device"] = before

    streams, pools = itertools.count(), itertools.count(1)
    current = Stream()
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda: current,
        "stream": lambda _stream: entered("side stream"),
        "graph": lambda _graph, pool, stream, **_: entered(f"capture on {stream.number} into {pool}"),
        "graph_pool_handle": lambda: f"pool {next(pools)}",
        "synchronize": lambda: log.append("synchronize"),
        "current_device": lambda: thread["device"],
        "device": device,
        "mem_get_info": lambda index: ((1 + index) << 30, 4 << 30),
        "empty_cache": lambda: log.append("empty cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", unpinned(torch.zeros))
    monkeypatch.setattr(torch, "empty", unpinned(torch.empty))
    monkeypatch.setattr(CudaDevice, "_device", property(lambda _: torch.device("cpu"), lambda *_: None), raising=False)
    return log


def test_a_host_side_is_written_again_only_when_its_copy_has_ended(cuda: Log) -> None:
    arena = open_device("cuda").arena(64)
    sides = []
    for value in (1, 2, 3):
        side, host = arena.begin()
        host[:] = value
        arena.upload(8)
        sides.append(side)
        assert arena.device[:8].tolist() == [value] * 8
    assert sides == [1, 0, 1]
    assert cuda == ["wait for event", "record event"] * 3
    assert not arena.device[8:].any()


def test_reading_starts_at_once_and_waits_when_asked(cuda: Log) -> None:
    tokens = torch.tensor([3, 4])
    wait = CudaDevice().read(tokens, tokens * 2)
    tokens[:] = 0
    assert cuda == ["record event"]
    assert [part.tolist() for part in wait()] == [[3, 4], [6, 8]]
    assert cuda == ["record event", "wait for event"]


def test_a_step_runs_before_it_is_recorded_and_living_recordings_share_a_pool(cuda: Log) -> None:
    device = CudaDevice()
    recordings = [device.record(lambda: cuda.append("run")) for _ in range(2)]
    once = ["wait for stream", "begin side stream", "run", "synchronize"]
    once += ["begin capture on 1 into pool 1", "run", "end capture on 1 into pool 1", "end side stream"]
    assert cuda == once * 2
    for replay in recordings:
        replay()
    assert cuda[-2:] == ["replay"] * 2


def test_a_pool_whose_recordings_are_all_gone_is_not_used_again(cuda: Log) -> None:
    """torch counts the graphs of a pool, and fails when one is recorded into a pool of none."""
    device = CudaDevice()
    recordings = [device.record(lambda: None) for _ in range(2)]
    del recordings[0]
    recordings.append(device.record(lambda: None))
    assert cuda[-2] == "end capture on 1 into pool 1"
    recordings.clear()
    recordings.append(device.record(lambda: None))
    assert cuda[-2] == "end capture on 1 into pool 2"


def test_a_recording_without_memory_is_ended_before_that_is_told(cuda: Log) -> None:
    """An error inside of it could keep torch from ending it, and would be replaced by the one about that."""

    def run() -> None:
        if "begin capture on 1 into pool 1" in cuda:
            held = torch.zeros(1000)
            allocated.append(weakref.ref(held))
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    allocated: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB") as error:
        CudaDevice().record(run)
    assert error.value.__context__ is None
    assert allocated[0]() is None
    assert cuda[-2:] == ["end capture on 1 into pool 1", "end side stream"]


def test_memory_that_is_given_back_is_told(cuda: Log) -> None:
    assert CudaDevice().reclaim() == "1.00 of 4.00 GiB are free on the GPU now"
    assert cuda == ["empty cache"]


def test_a_device_is_entered_only_where_another_is_current(cuda: Log, thread: dict[str, int]) -> None:
    thread["device"] = 1
    device = CudaDevice()
    with device.current():
        assert cuda == []
    thread["device"] = 0
    with device.current():
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    assert cuda == ["enter device 1"]
    assert device.reclaim() == "2.00 of 4.00 GiB are free on the GPU now"


class Where(ContextModel):
    """Notes the current device of every forward pass."""

    def __init__(self) -> None:
        super().__init__(61)
        self.devices: list[int] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.devices.append(torch.cuda.current_device())
        return super().forward(batch)


class Staging:
    """Stands in for the place of new weights; notes the current device."""

    def __init__(self) -> None:
        self.devices: list[int] = []

    def from_source(self, _source: object) -> None:
        self.devices.append(torch.cuda.current_device())


@pytest.mark.usefixtures("cuda")
def test_an_engine_computes_on_its_device_whatever_the_thread_has(thread: dict[str, int]) -> None:
    """A thread that an application starts has device 0, and the engine may have been started on another one."""
    thread["device"] = 3
    model, staging = Where(), Staging()
    options = EngineOptions(
        max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, num_pages=4, decode_buckets=(Bucket(2, 2),)
    )
    operators = SamplingOperators(sampling.sample, sampling.sample, sampling.logprobs)
    engine = Engine(model, operators, None, options, None, staging, device=Recorded())  # type: ignore[arg-type]
    thread["device"] = 0
    for _ in engine.warm_up():
        assert torch.cuda.current_device() == 0
    engine.add(Request(id="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=4, ignore_eos=True), seed=1))
    while engine.has_work:
        engine.step()
    engine.stage_weights("somewhere")
    assert set(model.devices) == set(staging.devices) == {3}
    assert torch.cuda.current_device() == 0


@pytest.mark.usefixtures("cuda")
def test_an_engine_that_nobody_holds_gives_its_memory_back_at_once() -> None:
    """Without waiting for Python to look for cycles: another engine may need the memory, or another process."""
    options = EngineOptions(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=32,
        num_pages=4,
        decode_buckets=(Bucket(2, 2),),
        ahead=True,
    )
    operators = SamplingOperators(sampling.sample, sampling.sample, sampling.logprobs)
    engine = Engine(ContextModel(61), operators, None, options, device=open_device("cuda"))
    list(engine.warm_up())
    engine.add(Request(id="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=4, ignore_eos=True), seed=1))
    engine.step()
    held = [weakref.ref(tensor) for tensor in (*engine.cache_tensors(), engine.model)]
    gc.disable()
    try:
        del engine
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()


@pytest.mark.usefixtures("cuda")
def test_an_engine_over_it_gives_what_one_on_a_cpu_gives() -> None:
    def replies(device: Any, **more: Any) -> dict[str, list[int]]:
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 96, "num_pages": 18}
        operators = SamplingOperators(sampling.sample, sampling.sample, sampling.logprobs)
        engine = Engine(ContextModel(61), operators, None, EngineOptions(**sizes, **more), device=device)
        list(engine.warm_up())
        for i in range(3):
            params = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
            engine.add(Request(id=str(i), prompt=[5 + i] * (3 + i), params=params, seed=i))
        found: dict[str, list[int]] = {str(i): [] for i in range(3)}
        while engine.has_work:
            for update in engine.step():
                found[update.id] += update.token_ids
        assert bool(engine.replays and engine.steps_ahead) == bool(more)
        return found

    assert replies(Recorded(), ahead=True, decode_buckets=(Bucket(2, 6), Bucket(4, 6))) == replies(None)


def test_settings_reach_torch_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}, torch.get_float32_matmul_precision()
    monkeypatch.setenv("NCCL_PROTO", "LL")
    try:
        # What a trainer may have done; torch raises where some of its ways of setting this are mixed.
        torch.set_float32_matmul_precision("high")
        apply_settings(GpuSettings("highest", {"NCCL_PROTO": "Simple"}, "this process used the GPU before"))
        assert [getattr(matmul, name) for name in names] == [False] * 2
        assert (matmul.allow_tf32, matmul.fp32_precision) == (False, "ieee")
        assert torch.get_float32_matmul_precision() == "highest"
        assert os.environ["NCCL_PROTO"] == "Simple"
        assert caplog.messages == ["this process used the GPU before"]
        apply_settings(GpuSettings())
        assert len(caplog.messages) == 1
        assert matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        for name, value in before[0].items():
            setattr(matmul, name, value)
        torch.set_float32_matmul_precision(before[1])


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu' is not one of cpu, cuda"):
        open_device("tpu")
