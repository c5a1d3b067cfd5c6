"""The engine in a process of its own, so that parsing and streaming never hold up a step.

`EngineProcess` is the parent's handle and imports no torch; `_run` is the child. The two ends of a socket pair carry
the messages of `wire.py`. When either process ends, the other reads the end of the stream at once: the child then
exits, and the parent tells every waiting caller.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, assert_never

import msgspec

from tokenspeed.engine import wire
from tokenspeed.engine.request import Request, TokenUpdate
from tokenspeed.errors import EngineDead, RequestError, StartRefused, TokenspeedError

ProgressCallback = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """What the loop below needs of an engine; `engine.Engine` is the real one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def add(self, request: Request, *, is_checked: bool = False) -> None:
        """Queue one sample. Raises RequestError when it can never run."""

    def abort(self, request_id: str) -> TokenUpdate | None:
        """Free everything that the sample holds. Its last update, or None when there is no such sample."""

    def step(self) -> list[TokenUpdate]:
        """One forward pass over the scheduled samples."""

    def stats(self) -> Any:
        """Counters and gauges, as a struct, dataclass or mapping."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while pages are held."""

    @property
    def weight_version(self) -> str:
        """Names the weights that compute."""
        ...

    @property
    def fingerprint(self) -> str:
        """What determines the bits, in short."""
        ...

    @property
    def certificate(self) -> Any:
        """What determines the bits, in full (`as_dict()`), or None."""
        ...

    def abort_all(self) -> list[TokenUpdate]:
        """Abort everything; the last updates."""

    def stage_weights(self, source: str) -> Any:
        """Read new weights from a folder, beside the old ones. Raises CheckpointError."""

    def install_weights(self, staged: Any, weight_version: str | None = None) -> None:
        """Compute with what `stage_weights` returned."""

    def rename_weights(self, weight_version: str) -> None:
        """Stamp replies with another version."""


EngineBuilder = Callable[[Any, ProgressCallback], tuple[EngineLike, wire.EngineInfo]]


class EngineProcess:
    """The parent's handle on a spawned engine process.

    `sock` is the parent's end of the pipe; whoever reads it after `wait_ready` (see `server.client`) owns it.
    """

    def __init__(self, process: multiprocessing.process.BaseProcess, sock: socket.socket) -> None:
        self._process = process
        self.sock = sock

    @classmethod
    def launch(cls, config: Any, build: EngineBuilder) -> EngineProcess:
        """Spawn the engine process; it builds its engine with `build(config, progress)`, a module-level function.

        `config` travels by pickle, once, from this process to its own child; nothing else ever does.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        process = context.Process(target=_run, args=(theirs, config, build), name="tokenspeed-engine", daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid or 0

    def wait_ready(self, progress: ProgressCallback) -> wire.EngineInfo:
        """Block until the engine runs, passing on its progress.

        Raises StartRefused, ConfigError, PluginError or CheckpointError as the engine did, or EngineDead.
        """
        pipe = wire.Pipe(self.sock)
        while True:
            try:
                message = wire.decode_from_engine(pipe.receive_one())
            except wire.PipeClosedError:
                raise EngineDead(f"the engine process ended while starting ({self.how_it_ended()})") from None
            if isinstance(message, wire.Progress):
                progress(message.stage, message.done, message.total)
            elif isinstance(message, wire.Ready):
                return message.info
            elif isinstance(message, wire.Refused):
                raise StartRefused(message.problems)
            elif isinstance(message, wire.Misused):
                raise wire.USERS_ERRORS[message.kind](message.message)
            elif isinstance(message, wire.Failed):
                raise EngineDead(f"the engine failed while starting:\n{message.message}")

    def how_it_ended(self, wait_seconds: float = 2.0) -> str:
        """`exit status 1`, `killed by SIGKILL`, … for messages; waits a moment for the status to be known."""
        self._process.join(wait_seconds)
        code = self._process.exitcode
        if code is None:
            return "still running, but its pipe is closed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the process: closing the pipe asks it to, then SIGKILL makes it."""
        self.sock.close()
        self._process.join(timeout_seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


class EngineLoop:
    """Messages in, steps, updates out; everything that happens in the engine process after the start."""

    def __init__(self, engine: EngineLike, pipe: wire.Pipe) -> None:
        self._engine = engine
        self._pipe = pipe
        self._paused = False
        self._stopping = False
        self._controls: Mapping[str, Callable[..., Any]] = {
            "stats": self._stats,
            "pause": self._pause,
            "resume": self._resume,
            "ping": lambda: True,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "update_weights": self._update_weights,
            "rename_weights": self._rename_weights,
        }

    def run(self) -> None:
        """Serve until the parent asks for the end or is gone."""
        while not self._stopping:
            idle = self._paused or not self._engine.has_work
            for body in self._pipe.receive(wait=idle):
                self._handle(wire.decode_to_engine(body))
            if not self._paused and self._engine.has_work:
                self._step()

    def _step(self) -> None:
        updates = self._engine.step()
        if updates:
            self._pipe.send(wire.Updates(updates))

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Submit():
                for group in message.groups:
                    accepted = False
                    for request in group.requests():
                        accepted = self._add(request, is_checked=accepted)
            case wire.Abort():
                self._abort(message)
            case wire.Call():
                self._pipe.send(self._call(message))
            case wire.Shutdown():
                self._stopping = True
            case _:
                assert_never(message)

    def _add(self, request: Request, *, is_checked: bool) -> bool:
        """Whether the engine accepts it; the client hears when not."""
        try:
            self._engine.add(request, is_checked=is_checked)
        except RequestError as error:
            self._pipe.send(wire.Rejected(request.id, str(error), error.param, error.code))
            return False
        return True

    def _abort(self, message: wire.Abort) -> None:
        updates = [update for request_id in message.ids if (update := self._engine.abort(request_id)) is not None]
        if message.report and updates:
            self._pipe.send(wire.Updates(updates))

    def _call(self, message: wire.Call) -> wire.Reply:
        method = self._controls.get(message.method)
        if method is None:
            return wire.Reply(message.id, error=f"the engine has no control method {message.method!r}")
        try:
            return wire.Reply(message.id, result=method(**message.args))
        except (TokenspeedError, TypeError, ValueError) as error:
            return wire.Reply(message.id, error=f"{type(error).__name__}: {error}")

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = msgspec.to_builtins(self._engine.stats())
        return stats | {"paused": self._paused}

    def _update_weights(self, folder: str, weight_version: str | None, abort: bool) -> dict[str, Any]:
        """Exchange the weights for a folder's. Only once they are known to be good, requests are ended with `abort`."""
        staged = self._engine.stage_weights(folder)
        if abort and (aborted := self._engine.abort_all()):
            self._pipe.send(wire.Updates(aborted))
        self._engine.install_weights(staged, weight_version)
        return self._weights()

    def _rename_weights(self, weight_version: str, abort: bool) -> dict[str, Any]:
        if abort and (aborted := self._engine.abort_all()):
            self._pipe.send(wire.Updates(aborted))
        self._engine.rename_weights(weight_version)
        return self._weights()

    def _weights(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "weight_version": engine.weight_version,
            "fingerprint": engine.fingerprint,
            "certificate": engine.certificate and engine.certificate.as_dict(),
        }

    def _pause(self) -> bool:
        self._paused = True
        return True

    def _resume(self) -> bool:
        self._paused = False
        return True


def _run(sock: socket.socket, config: Any, build: EngineBuilder) -> None:
    """The child: build the engine, tell the parent how that goes, then loop.

    A terminal's Ctrl-C and a process group's SIGTERM reach this process too; the parent alone decides when to end, and
    its end is read from the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = wire.Pipe(sock)
    started = time.monotonic()
    try:
        engine, info = build(config, lambda stage, done, total: pipe.send(wire.Progress(stage, done, total)))
        pipe.send(wire.Ready(msgspec.structs.replace(info, load_seconds=time.monotonic() - started)))
        EngineLoop(engine, pipe).run()
    except wire.PipeClosedError:
        return
    except StartRefused as refusal:
        pipe.send(wire.Refused(list(refusal.problems)))
    except tuple(wire.USERS_ERRORS.values()) as error:
        pipe.send(wire.Misused(type(error).__name__, str(error)))
    except BaseException:
        with contextlib.suppress(wire.PipeClosedError):
            pipe.send(wire.Failed(traceback.format_exc()))
        raise
