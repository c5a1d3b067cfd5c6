"""The asynchronous client of the engine process: submit, stream, abort, call. One per event loop; imports no torch.

Samples are routed by their engine-internal ids, which this client makes unique. A reader that falls behind finds its
updates merged, so a slow connection holds no more than its own reply. When the engine ends, every waiting caller gets
`EngineDead` and so does every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tokenspeed.engine import wire
from tokenspeed.engine.process import EngineProcess
from tokenspeed.engine.request import TokenUpdate
from tokenspeed.errors import ContextOverflow, EngineDead, RequestError

_log = logging.getLogger("tokenspeed.server")


class SampleStream:
    """The updates of a group of samples, in the order of arrival; ends when all have finished.

    Close it (or leave its `with` block) to abort what is still running.
    """

    def __init__(self, client: EngineClient, ids: Sequence[str]) -> None:
        self._client = client
        self._open = set(ids)
        self._pending: dict[str, list[TokenUpdate]] = {}
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[TokenUpdate]:
        async for batch in self.batches():
            for update in batch:
                yield update

    async def batches(self) -> AsyncIterator[list[TokenUpdate]]:
        """What has arrived since the last time, at most one update for each sample. Raises EngineDead, RequestError."""
        while self._pending or self._open:
            if self._pending:
                arrived, self._pending = self._pending, {}
                yield [merge(updates) for updates in arrived.values()]
            elif self._error is not None:
                raise self._error
            else:
                self._wake.clear()
                await self._wake.wait()

    def close(self) -> None:
        """Abort the samples that have not finished."""
        if self._open:
            self._client._abandon(self._open)
            self._open = set()

    def deliver(self, update: TokenUpdate) -> None:
        """Called by the client, in the event loop."""
        self._pending.setdefault(update.id, []).append(update)
        if update.finish_reason is not None:
            self._open.discard(update.id)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after what has already arrived."""
        self._error = error
        self._wake.set()


def merge(updates: list[TokenUpdate]) -> TokenUpdate:
    """One update that says what `updates` (of one sample, in order) say."""
    if len(updates) == 1:
        return updates[0]
    last = updates[-1]
    logprobs = [entry for update in updates for entry in update.logprobs or ()]
    return TokenUpdate(
        id=last.id,
        token_ids=[token for update in updates for token in update.token_ids],
        text="".join(update.text for update in updates),
        logprobs=logprobs if any(update.logprobs is not None for update in updates) else None,
        prompt_logprobs=next((u.prompt_logprobs for u in updates if u.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        cached_tokens=max(update.cached_tokens for update in updates),
        preemptions=max(update.preemptions for update in updates),
        seed=last.seed or updates[0].seed,
        weight_version=last.weight_version or updates[0].weight_version,
        fingerprint=last.fingerprint,
    )


class EngineClient:
    """Many concurrent callers in one event loop, one engine process.

    `dead` is the reason once the engine has ended or the client is closed, `failure` the reason when the engine ended
    by itself. `in_flight` counts the samples that have not finished.
    """

    def __init__(self, process: EngineProcess, info: wire.EngineInfo) -> None:
        self.info = info
        self.dead: EngineDead | None = None
        self.failure: EngineDead | None = None
        self._process = process
        self._numbers = itertools.count()
        self._streams: dict[str, SampleStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Samples that have been submitted and have not finished."""
        return len(self._streams)

    async def open(self) -> None:
        """Take over the pipe; call once, in the event loop that will use the client."""
        reader, self._writer = await asyncio.open_connection(sock=self._process.sock)
        self._reading = asyncio.create_task(self._read(reader), name="engine-reader")

    async def close(self) -> None:
        """End the engine process; whoever still waits gets EngineDead."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._die("the server is shutting down")
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        await asyncio.to_thread(self._process.stop)

    def unique_id(self, hint: str) -> str:
        """An id that no other sample of this engine has; `hint` (a caller's id) only helps to read logs."""
        return f"{hint[:64]}-{next(self._numbers):x}"

    def submit(self, groups: Sequence[wire.Group]) -> SampleStream:
        """Start the samples; their ids must come from `unique_id`. Raises EngineDead."""
        ids = [request_id for group in groups for request_id, _ in group.samples]
        stream = SampleStream(self, ids)
        self._send(wire.Submit(list(groups)))
        self._streams.update(dict.fromkeys(ids, stream))
        return stream

    def abort(self, ids: Sequence[str]) -> int:
        """Finish these samples with `finish_reason` abort; their partial output stands. Returns how many were open."""
        open_ids = [request_id for request_id in ids if request_id in self._streams]
        if open_ids:
            self._send(wire.Abort(open_ids, report=True))
        return len(open_ids)

    def open_ids(self) -> list[str]:
        """The ids of all samples that have not finished."""
        return list(self._streams)

    async def call(self, method: str, timeout_seconds: float | None = None, **args: Any) -> Any:
        """Run a control method in the engine process, between two steps.

        Raises EngineDead, RequestError (the method's own error) or TimeoutError.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(wire.Call(number, method, args))
            return await asyncio.wait_for(future, timeout_seconds)
        finally:
            self._calls.pop(number, None)

    async def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        stats: dict[str, Any] = await self.call("stats")
        return stats

    def _send(self, message: wire.ToEngine) -> None:
        if self.dead is not None:
            raise self.dead
        if self._writer is None:
            raise RuntimeError("EngineClient.open() has not run")
        self._writer.write(wire.frame(message))

    def _abandon(self, ids: set[str]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)
        if self.dead is None and self._writer is not None:
            self._writer.write(wire.frame(wire.Abort(sorted(ids))))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = ""
        try:
            while True:
                header = await reader.readexactly(wire.LENGTH_BYTES)
                message = wire.decode_from_engine(await reader.readexactly(wire.frame_length(header)))
                if isinstance(message, wire.Failed):
                    reason = message.message.strip()
                else:
                    self._dispatch(message)
        except (OSError, asyncio.IncompleteReadError):
            how = await asyncio.to_thread(self._process.how_it_ended)
            self._fail(f"the engine process ended ({how})" + (f":\n{reason}" if reason else ""))
        except Exception as error:  # a message that this version does not understand: nobody may be left waiting
            self._fail(f"the engine's pipe is broken: {error!r}")

    def _dispatch(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Updates():
                for update in message.updates:
                    self._deliver(update)
            case wire.Rejected():
                kind = ContextOverflow if message.code == "context_length_exceeded" else RequestError
                stream = self._streams.pop(message.id, None)
                if stream is not None:
                    stream.fail(kind(message.message, param=message.param, code=message.code))
            case wire.Reply():
                future = self._calls.get(message.id)
                if future is not None and not future.done():
                    if message.error is None:
                        future.set_result(message.result)
                    else:
                        future.set_exception(RequestError(message.error))
            case _:
                raise RuntimeError(f"the engine sent {type(message).__name__} after its start")

    def _deliver(self, update: TokenUpdate) -> None:
        stream = self._streams.get(update.id)
        if stream is None:  # abandoned a moment ago
            return
        if update.finish_reason is not None:
            del self._streams[update.id]
        stream.deliver(update)

    def _fail(self, reason: str) -> None:
        self._die(reason)
        self.failure = self.dead
        _log.error("EngineDead: %s", reason)

    def _die(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = EngineDead(reason)
        for stream in set(self._streams.values()):
            stream.fail(self.dead)
        self._streams.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead)
