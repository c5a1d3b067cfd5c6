"""What all routes share: the engine's client, the texts, the limits, and who may start something now."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.engine.wire import EngineInfo
from tokenspeed.errors import EngineDead
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import ApiError
from tokenspeed.server.generation import Generation
from tokenspeed.server.limits import Limits
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.text import TextService

STATS_SECONDS = 2.0
"""How long to wait for the counters of an engine that is between two steps, or loads weights, before repeating them."""

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ServiceOptions:
    """`model_names` are the names that requests may use, the first one is reported. `public` holds the server's options
    for `/server_info`, without secrets. `is_loopback` says that only this machine can connect."""

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    control_key: str | None = None
    is_loopback: bool = True
    metrics_compat: tuple[str, ...] = ()
    public: dict[str, Any] | None = None


class Service:
    """Shared state of one server. `draining` and `is_paused` say why new work may be refused."""

    def __init__(self, client: EngineClient, text: TextService, limits: Limits, options: ServiceOptions) -> None:
        self.client = client
        self.text = text
        self.limits = limits
        self.options = options
        self.metrics = Metrics(options.model_names[0], numerics=_labels(client.info), compat=options.metrics_compat)
        self.created = int(time.time())
        self.draining = False
        self.is_paused = False
        self._refusing: str | None = None
        self._turn = 0
        self._exchanges = 0
        self._stats: dict[str, Any] = {}
        self._engine_ids: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it started, and when its weights were changed."""
        return self.client.info

    @property
    def model_name(self) -> str:
        """The name that replies carry."""
        return self.options.model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is None:
            return self.model_name
        if name not in self.options.model_names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", param="model", reason="model_not_found")
        return name

    def check_alive(self) -> None:
        """Raises ApiError 503 when the engine's process has ended."""
        if self.client.dead is not None:
            raise ApiError(503, f"EngineDead: {self.client.dead}", reason="engine_dead")

    def check_accepting(self) -> None:
        """Raises ApiError 503 when there is no engine, or soon none."""
        self.check_alive()
        if self.draining:
            raise ApiError(503, "the server is shutting down", reason="draining")

    def check_ready(self) -> None:
        """Raises ApiError 503 when a new request would be refused, or would wait for more than its turn."""
        self.check_accepting()
        if self.is_paused:
            raise ApiError(503, self._refusing or "the server is paused; resume it first", reason="paused")
        if self._exchanges:
            raise ApiError(503, "the engine is loading new weights; requests wait until it has", reason="loading")

    def admit(self, samples: int) -> None:
        """Raises ApiError 503 when nothing new may start now, or not so much."""
        self.check_accepting()
        if self._refusing is not None:
            raise ApiError(503, self._refusing, reason="paused")
        if self.client.in_flight + samples > self.limits.max_in_flight:
            message = (
                f"the queue is full: {self.client.in_flight} samples are in flight, at most {self.limits.max_in_flight}"
            )
            raise ApiError(503, message, reason="queue_full", headers={"retry-after": "1"})

    def started(self, generation: Generation) -> None:
        """Called by every generation when it has been submitted."""
        for external_id, engine_id in generation.engine_ids:
            self._engine_ids[external_id].add(engine_id)
        self.metrics.started(generation)

    def ended(self, generation: Generation) -> None:
        """Called by every generation when it is over, whatever the reason."""
        self.metrics.ended(generation, "abort" if self.client.dead is None else "error")
        for external_id, engine_id in generation.engine_ids:
            ids = self._engine_ids[external_id]
            ids.discard(engine_id)
            if not ids:
                del self._engine_ids[external_id]

    def abort(self, external_ids: Sequence[str] | None = None) -> int:
        """End samples with `finish_reason` abort: those of these requests, or all. Returns how many were running."""
        if external_ids is None:
            return self.client.abort(self.client.open_ids())
        wanted = {name for given in external_ids for name in (given, f"cmpl-{given}", f"chatcmpl-{given}")}
        return self.client.abort([engine_id for name in wanted for engine_id in self._engine_ids.get(name, ())])

    async def idle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no sample is in flight; False when time is out or the engine is dead."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.client.in_flight:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return self.client.dead is None

    async def pause(self, mode: str, *, keep_accepting: bool) -> None:
        """Stop the engine between two steps: `abort` ends what runs, `wait` lets it finish, `keep` freezes it.

        Unless `keep_accepting`, new requests get 503 until `resume`; otherwise they wait. A pause that waits gives up
        when another one or `resume` comes.
        """
        self._turn = turn = self._turn + 1
        self.is_paused = True
        if not keep_accepting:
            self._refusing = f"the server is paused (mode {mode}); resume it first"
        if mode == "wait":
            await self.client.call("resume")  # what an earlier pause froze finishes only if it runs
            while self.client.in_flight and turn == self._turn:
                await asyncio.sleep(_POLL_SECONDS)
            if turn != self._turn:
                return
        await self.client.call("pause")
        if mode == "abort":
            self.abort()
            await self.client.call("ping")  # the engine answers in order: what was aborted has been reported

    async def resume(self) -> None:
        """Go on after `pause`; nothing happens when not paused."""
        self._turn += 1
        self.is_paused = False
        self._refusing = None
        await self.client.call("resume")

    async def drain(self, timeout_seconds: float) -> bool:
        """Let what runs finish, also what a pause has frozen; False when time is out or the engine is dead."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.resume()
                return await self.idle()
        except (TimeoutError, EngineDead):
            return False

    async def change_weights(self, method: str, **arguments: Any) -> EngineInfo:
        """Call a control method that changes the weights or their version, and keep what it says.

        Raises RequestError when the engine refuses; nothing has changed then.
        """
        self._exchanges += 1
        try:
            found = await self.client.call(method, **arguments)
        finally:
            self._exchanges -= 1
        self.client.info = msgspec.structs.replace(
            self.info,
            weight_version=found["weight_version"],
            fingerprint=found["fingerprint"],
            numerics={**self.info.numerics, "certificate": found["certificate"]},
        )
        self.metrics.numerics_changed(_labels(self.info))
        return self.info

    async def stats(self, timeout_seconds: float = STATS_SECONDS) -> dict[str, Any]:
        """The engine's counters and gauges, the last ones when it does not answer in time; none when it is dead."""
        try:
            self._stats = await self.client.call("stats", timeout_seconds)
        except EngineDead:
            self._stats = {}
        except TimeoutError:
            pass
        return self._stats


def _labels(info: EngineInfo) -> dict[str, str]:
    numerics = info.numerics.get("numerics", {})
    return {"system_fingerprint": info.fingerprint, "envelope": str(numerics.get("envelope", ""))}
