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

from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.device import CudaDevice, apply_settings, open_device
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.errors import ConfigError
from tokenspeed.kernels.reference import sampling
from tokenspeed.testing.context_model import ContextModel

pytestmark = pytest.mark.usefixtures("one_thread")

Log = list[str]


class Recorded(CudaDevice):
    """What was recorded runs again, since a made-up graph cannot replay."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return run


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Stands in for `torch.cuda`; returns the log of what was called."""
    log: Log = []

    class Event:
        def record(self) -> None:
            log.append("record event")

        def synchronize(self) -> None:
            log.append("wait for event")

    class Stream:
        def wait_stream(self, _other: object) -> None:
            log.append("wait for stream")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        log.append(f"begin {what}")
        yield
        log.append(f"end {what}")

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **more: make(*args, **more)  # noqa: ARG005

    current, pools = Stream(), itertools.count(1)
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda: current,
        "stream": lambda _stream: entered("side stream"),
        "graph": lambda _graph, pool, **_: entered(f"capture into {pool}"),
        "graph_pool_handle": lambda: f"pool {next(pools)}",
        "synchronize": lambda: log.append("synchronize"),
        "current_device": lambda: 0,
        "mem_get_info": lambda: (1 << 30, 4 << 30),
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
    once = ["wait for stream", "begin side stream", "run", "end side stream", "wait for stream", "synchronize"]
    assert cuda == [*once, "begin capture into pool 1", "run", "end capture into pool 1"] * 2
    for replay in recordings:
        replay()
    assert cuda[-2:] == ["replay"] * 2


def test_a_pool_whose_recordings_are_all_gone_is_not_used_again(cuda: Log) -> None:
    """torch counts the graphs of a pool, and fails when one is recorded into a pool of none."""
    device = CudaDevice()
    recordings = [device.record(lambda: None) for _ in range(2)]
    del recordings[0]
    recordings.append(device.record(lambda: None))
    assert cuda[-1] == "end capture into pool 1"
    recordings.clear()
    recordings.append(device.record(lambda: None))
    assert cuda[-1] == "end capture into pool 2"


def test_memory_that_is_given_back_is_told(cuda: Log) -> None:
    assert CudaDevice().reclaim() == "1.00 of 4.00 GiB are free on the GPU now"
    assert cuda == ["empty cache"]


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


def test_settings_reach_torch_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}, torch.backends.cudnn.allow_tf32
    monkeypatch.setenv("NCCL_PROTO", "LL")
    try:
        apply_settings(False, {"NCCL_PROTO": "Simple"})
        assert [getattr(matmul, name) for name in names] == [False] * 3
        assert not torch.backends.cudnn.allow_tf32
        assert os.environ["NCCL_PROTO"] == "Simple"
        apply_settings(True, {})
        assert matmul.allow_tf32
    finally:
        for name, value in before[0].items():
            setattr(matmul, name, value)
        torch.backends.cudnn.allow_tf32 = before[1]


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu' is not one of cpu, cuda"):
        open_device("tpu")
