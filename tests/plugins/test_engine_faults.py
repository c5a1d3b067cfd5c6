"""Negative controls in the engine: faults that other engines had, put into ours, and the scenario that catches it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.engine import prefix_cache
from tokenspeed.engine.kv_cache import KVCache
from tokenspeed.engine.penalties import TokenCounts
from tokenspeed.engine.runner import Runner
from tokenspeed.engine.sampler import Sampler
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.engine.state import RequestState
from tokenspeed.verify.invariance import verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Work

SMALL = Work("small", 9, 8, 4, 2, (7,), prefixes=(1, 15, 16, 17, 33, 48, 64), long_tokens=70)

Patch = Callable[[pytest.MonkeyPatch], None]


def page_without_its_past(patch: pytest.MonkeyPatch) -> None:
    """A page is known by its own tokens, whatever came before."""

    def key(_parent: bytes, tokens: np.ndarray) -> bytes:
        return hashlib.sha256(tokens.tobytes()).digest()

    patch.setattr(prefix_cache, "child_key", key)


def page_freed_under_its_readers(patch: pytest.MonkeyPatch) -> None:
    """Whoever shares a page does not count as a user of it."""

    def acquire(cache: Any, pages: list[int]) -> None:
        for page in pages:
            cache._references[page] = 1
            cache._index.mark_used(page)

    patch.setattr(KVCache, "acquire", acquire)


def page_published_too_early(patch: pytest.MonkeyPatch) -> None:
    """The page after the last full one is offered as well: its tokens are known, not all of its KV is written."""
    computed = Scheduler.computed

    def early(scheduler: Any, state: RequestState, count: int) -> None:
        computed(scheduler, state, count)
        page = state.computed // 16
        if scheduler._prefix_caching and page < len(state.tokens()) // 16 and page < len(state.pages):
            prefix_cache.chain_keys(scheduler._root, state.tokens(), state.chain)
            scheduler.cache.publish(state.chain[page], state.pages[page])

    patch.setattr(Scheduler, "computed", early)


def chunk_positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    """Every chunk but the first is given the positions of the first."""
    build = Runner.build

    def wrong(runner: Any, schedule: Any) -> Any:
        batch, rows = build(runner, schedule)
        for index, (state, count) in enumerate(zip(schedule.chunks, schedule.counts, strict=True)):
            if state.computed and count > 1:
                first = int(batch.query_starts[len(schedule.decodes) + index])
                batch.positions[first : first + count] -= state.computed
        return batch, rows

    patch.setattr(Runner, "build", wrong)


def penalties_forget_what_they_counted(patch: pytest.MonkeyPatch) -> None:
    """A preempted request counts its tokens anew, the generated ones as prompt."""
    preempt = Scheduler._preempt_youngest

    def forgetful(scheduler: Any) -> None:
        preempt(scheduler)
        state = next(iter(scheduler.waiting.values()))
        if state.counts is not None:
            fresh = TokenCounts(state.tokens().tolist())
            state.counts.__dict__.update(fresh.__dict__)

    patch.setattr(Scheduler, "_preempt_youngest", forgetful)


def seat_keeps_the_seed_of_its_first_owner(patch: pytest.MonkeyPatch) -> None:
    """The parameters of a seat are written anew, but for the seed."""
    take = Sampler._take_seat

    def forgetful(sampler: Any, state: RequestState) -> None:
        owned, seed = sampler._owner[state.seat] is not None, sampler._seed[state.seat]
        take(sampler, state)
        if owned:
            sampler._seed[state.seat] = seed

    patch.setattr(Sampler, "_take_seat", forgetful)


CAUGHT: dict[Patch, tuple[str, str]] = {
    page_without_its_past: ("prefix", "attention.paged"),
    page_freed_under_its_readers: ("neighbours", "attention.paged"),
    page_published_too_early: ("prefix", "attention.paged"),
    chunk_positions_from_zero: ("chunks", "rope.apply"),
    penalties_forget_what_they_counted: ("preemption", "sampling.sample"),
    seat_keeps_the_seed_of_its_first_owner: ("order", "the fault lies between them"),
}


@pytest.mark.parametrize("fault", CAUGHT, ids=lambda fault: fault.__name__)
def test_caught(fault: Patch, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(load_config({"model": str(tiny_qwen3), "numerics": "rl-bitwise"}, environ={}))
    fault(monkeypatch)
    scenario, operator = CAUGHT[fault]
    report = verify_engine(lab, SMALL, only=(scenario,))
    (result,) = report.results
    assert result.verdict == "differs", result.as_dict()
    assert operator in result.findings[0].location
