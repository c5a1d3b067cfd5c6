"""The pipe, the loop behind it and the client in front of it, with an engine that only counts."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tokenspeed.engine import wire
from tokenspeed.engine.process import EngineLoop
from tokenspeed.engine.request import PositionLogprobs, Request, SamplingParams, TokenLogprob, TokenUpdate
from tokenspeed.engine.validation import Limits
from tokenspeed.errors import EngineDead, Problem, RequestError
from tokenspeed.server.client import EngineClient, merge

INFO = wire.EngineInfo(
    model_path="/model",
    architecture="None",
    dtype="float32",
    logprobs_mode="processed",
    limits=Limits(vocab_size=10, max_model_len=100),
    max_num_seqs=4,
    kv_tokens=64,
    fingerprint="f",
    numerics={},
    card="",
)


class CountingEngine:
    """Emits 0, 1, 2, … for each sample until `max_tokens`; fails when told to."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[Request, int]] = {}
        self.broken = False
        self.most_running = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request, *, is_checked: bool = False) -> None:
        if request.prompt == [9]:
            raise RequestError("nine is not allowed", param="prompt", code="nine")
        self.running[request.id] = (request, 0)
        self.most_running = max(self.most_running, len(self.running))

    def abort(self, request_id: str) -> TokenUpdate | None:
        found = self.running.pop(request_id, None)
        return None if found is None else TokenUpdate(id=request_id, finish_reason="abort")

    def step(self) -> list[TokenUpdate]:
        if self.broken:
            raise ValueError("broken on purpose")
        updates = []
        for request_id, (request, count) in list(self.running.items()):
            is_last = count + 1 == request.params.max_tokens
            updates.append(TokenUpdate(id=request_id, token_ids=[count], finish_reason="length" if is_last else None))
            self.running[request_id] = (request, count + 1)
            if is_last:
                del self.running[request_id]
        return updates

    def stats(self) -> dict[str, int]:
        return {"running": len(self.running)}

    def reset_prefix_cache(self) -> bool:
        return True


class ThreadProcess:
    """Stands in for `EngineProcess`: the same loop, in a thread."""

    def __init__(self, engine: CountingEngine) -> None:
        self.sock, self._theirs = socket.socketpair()
        self._loop = EngineLoop(engine, wire.Pipe(self._theirs))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except (wire.PipeClosedError, ValueError):
            pass
        finally:
            self._theirs.close()

    def how_it_ended(self) -> str:
        self._thread.join()
        return "exit status 1"

    def stop(self) -> None:
        self.sock.close()
        self._thread.join()


@asynccontextmanager
async def running(engine: CountingEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(ThreadProcess(engine), INFO)  # type: ignore[arg-type]
    await client.open()
    try:
        yield client
    finally:
        await client.close()


def group(client: EngineClient, tokens: int, samples: int = 1, prompt: list[int] | None = None) -> wire.Group:
    named = [(client.unique_id("same"), seed) for seed in range(samples)]
    return wire.Group(prompt=prompt or [1], params=SamplingParams(max_tokens=tokens), samples=named, arrival=0.0)


async def collect(stream: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    async for update in stream:
        found.setdefault(update.id, []).extend(update.token_ids)
    return found


def test_many_groups_each_get_their_own_tokens() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            streams = [client.submit([group(client, 5 + i, samples=3)]) for i in range(40)]
            for i, found in enumerate(await asyncio.gather(*map(collect, streams))):
                assert list(found.values()) == [list(range(5 + i))] * 3
            assert client.in_flight == 0
            assert await client.stats() == {"running": 0, "paused": False}

    asyncio.run(run())


def test_closing_a_stream_frees_its_samples_and_no_other() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            spared = client.submit([group(client, 300)])
            with client.submit([group(client, 10**9, samples=4)]) as doomed:
                async for _ in doomed:
                    break
            assert list((await collect(spared)).values()) == [list(range(300))]
            assert (await client.stats())["running"] == 0

    asyncio.run(run())


def test_a_slow_reader_gets_merged_updates_and_misses_nothing() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            stream = client.submit([group(client, 2000)])
            received, batches = 0, 0
            async for batch in stream.batches():
                assert len(batch) == 1
                received += len(batch[0].token_ids)
                batches += 1
                await asyncio.sleep(0.005)
            assert received == 2000
            assert batches < 1000

    asyncio.run(run())


def test_a_refused_request_fails_alone() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            good = client.submit([group(client, 50)])
            bad = client.submit([group(client, 50, prompt=[9])])
            with pytest.raises(RequestError, match="nine is not allowed") as refused:
                await collect(bad)
            assert refused.value.code == "nine"
            assert len(next(iter((await collect(good)).values()))) == 50

    asyncio.run(run())


def test_abort_reports_the_end_and_ids_are_unique() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            groups = [group(client, 10**9, samples=2) for _ in range(2)]
            ids = [name for item in groups for name, _ in item.samples]
            assert len(set(ids)) == 4
            stream = client.submit(groups)
            assert client.abort([*ids, "unknown"]) == 4
            assert len(await collect(stream)) == 4

    asyncio.run(run())


def test_pause_stops_steps_and_resume_goes_on() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            await client.call("pause")
            stream = client.submit([group(client, 3)])
            task = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0.05)
            assert not task.done()
            assert (await client.stats())["paused"]
            await client.call("resume")
            assert list((await task).values()) == [[0, 1, 2]]

    asyncio.run(run())


def test_an_unknown_control_method_is_an_error_of_the_caller() -> None:
    async def run() -> None:
        async with running(CountingEngine()) as client:
            with pytest.raises(RequestError, match="no control method"):
                await client.call("explode")
            with pytest.raises(RequestError, match="TypeError"):
                await client.call("pause", what=1)
            assert await client.call("ping")

    asyncio.run(run())


def test_a_dead_engine_reaches_every_waiter_at_once_and_for_ever() -> None:
    async def run() -> None:
        engine = CountingEngine()
        async with running(engine) as client:
            streams = [client.submit([group(client, 10**9)]) for _ in range(5)]
            engine.broken = True
            results = await asyncio.wait_for(
                asyncio.gather(*map(collect, streams), client.call("stats"), return_exceptions=True), 10
            )
            assert all(isinstance(result, EngineDead) for result in results[:5])
            assert client.failure is not None
            for _ in range(2):
                with pytest.raises(EngineDead, match="exit status 1"):
                    client.submit([group(client, 1)])
                with pytest.raises(EngineDead):
                    await client.stats()

    asyncio.run(run())


def test_closing_the_client_is_no_failure_and_nobody_waits() -> None:
    async def run() -> None:
        engine = CountingEngine()
        async with running(engine) as client:
            task = asyncio.ensure_future(collect(client.submit([group(client, 10**9)])))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="shutting down"):
            await task
        assert client.failure is None

    asyncio.run(run())


def test_merging_updates_keeps_every_part() -> None:
    entry = PositionLogprobs(TokenLogprob(5, -0.5, 1), [])
    first = TokenUpdate(id="a", token_ids=[5], text="x", logprobs=[entry], prompt_logprobs=[None], cached_tokens=16)
    last = TokenUpdate(id="a", token_ids=[6], text="y", logprobs=[entry], finish_reason="stop", stop_reason="y")
    both = merge([first, last])
    assert both.token_ids == [5, 6]
    assert both.text == "xy"
    assert both.logprobs == [entry, entry]
    assert both.prompt_logprobs == [None]
    assert (both.finish_reason, both.stop_reason, both.cached_tokens) == ("stop", "y", 16)
    assert merge([TokenUpdate(id="a"), TokenUpdate(id="a")]).logprobs is None


@pytest.fixture
def pipes() -> Iterator[tuple[wire.Pipe, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield wire.Pipe(ours), theirs


def test_frames_survive_any_split(pipes: tuple[wire.Pipe, socket.socket]) -> None:
    pipe, theirs = pipes
    messages = [wire.Abort([f"id-{i}" * i]) for i in range(30)]
    data = b"".join(map(wire.frame, messages))
    cuts = sorted(random.Random(1).sample(range(len(data)), 40))
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        theirs.sendall(data[start:end])
        found += pipe.receive(wait=False)
    assert [wire.decode_to_engine(body) for body in found] == messages


def test_the_end_of_the_other_side_is_noticed(pipes: tuple[wire.Pipe, socket.socket]) -> None:
    pipe, theirs = pipes
    theirs.close()
    with pytest.raises(wire.PipeClosedError):
        pipe.receive(wait=True)
    with pytest.raises(wire.PipeClosedError):
        pipe.receive_one()
    with pytest.raises(wire.PipeClosedError):
        pipe.send(wire.Shutdown())


def test_messages_keep_their_bits_and_problems() -> None:
    value = float.fromhex("-0x1.23456ep+1")
    entry = PositionLogprobs(TokenLogprob(1, value, 1), [TokenLogprob(2, float("-inf"), 7)])
    updates = wire.Updates([TokenUpdate(id="a", logprobs=[entry], seed=2**63 - 1)])
    refused = wire.Refused([Problem("size", "too large", ("a", "b"), "make it smaller")])
    for message in (updates, refused, wire.Ready(INFO)):
        assert wire.decode_from_engine(wire.frame(message)[wire.LENGTH_BYTES :]) == message
