"""What the tests of the engine share: a small engine, devices as far from a CPU as can be, and replies to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.device import CpuDevice
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import PositionLogprobs, Request, SamplingParams, TokenUpdate
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.kernels.reference import sampling
from tokenspeed.testing.context_model import ContextModel

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


@dataclass
class Result:
    """All updates of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    updates: int = 0


def make_engine(model: ContextModel | None = None, *, apart: bool = False, **options: Any) -> Engine:
    """An engine that is soon short of pages and budget, on an `ApartDevice` or on this machine."""
    device = ApartDevice() if apart else None
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 96, "num_pages": 6, "eos_ids": (0,)}
    return Engine(model or ContextModel(VOCAB), OPERATORS, None, EngineOptions(**{**sizes, **options}), device=device)


def request(name: str, prompt: list[int], seed: int = 0, **params: Any) -> Request:
    """A request of up to 8 tokens, unless `params` say otherwise."""
    return Request(id=name, prompt=prompt, seed=seed, params=SamplingParams(**{"max_tokens": 8, **params}))


def alone(request: Request, model: ContextModel | None = None) -> Result:
    """The request by itself, in one chunk, without a prefix cache."""
    engine = make_engine(model, max_num_seqs=1, max_num_batched_tokens=96, num_pages=6, prefix_caching=False)
    return run(engine, [request])[request.id]


def run(engine: Engine, requests: list[Request]) -> dict[str, Result]:
    """Add the requests together and run them to their ends; what each got."""
    results = {request.id: Result() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        absorb(results, engine.step())
    return results


def absorb(results: dict[str, Result], updates: list[TokenUpdate]) -> None:
    """Put a step's updates to those before."""
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


def idle(engine: Engine) -> bool:
    """Nothing waits, runs or holds a page."""
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0) and (
        stats.pages_idle + stats.pages_free == stats.pages_total
    )
