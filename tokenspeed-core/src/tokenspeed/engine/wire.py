"""What crosses the pipe between the HTTP process and the engine process, and how it is framed.

Every message is a tagged msgspec struct in msgpack behind a 4-byte big-endian length: nothing that came from the
network is ever unpickled. No torch here; both processes import this module.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenspeed.engine.request import Request, SamplingParams, TokenUpdate
from tokenspeed.engine.validation import Limits
from tokenspeed.errors import CheckpointError, ConfigError, PluginError, Problem, TokenspeedError

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
_READ_BYTES = 1 << 20

USERS_ERRORS: dict[str, type[TokenspeedError]] = {
    kind.__name__: kind for kind in (ConfigError, PluginError, CheckpointError)
}
"""Exceptions whose message is all that a user needs, by the name under which they cross the pipe."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP process knows of the started engine. `numerics` is served as it is.

    `card` is the plan's card as plain text. `fingerprint` stamps every reply. `kv_tokens` is the capacity of the KV
    cache in tokens, `load_seconds` the time from launch to ready.
    """

    model_path: str
    architecture: str
    dtype: str
    logprobs_mode: str
    limits: Limits
    max_num_seqs: int
    kv_tokens: int
    fingerprint: str
    numerics: dict[str, Any]
    card: str
    weight_version: str = ""
    load_seconds: float = 0.0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one prompt, which crosses the pipe once. `samples` are (engine id, seed).

    With `prompt_logprobs_once` only the first sample reads the prompt's logprobs. `arrival` as in `Request`.
    """

    prompt: list[int]
    params: SamplingParams
    samples: list[tuple[str, int]]
    arrival: float
    prompt_logprobs_once: bool = True

    def requests(self) -> Iterator[Request]:
        """One request for each sample."""
        own = self.params
        others = msgspec.structs.replace(own, prompt_logprobs=None) if self.prompt_logprobs_once else own
        for i, (request_id, seed) in enumerate(self.samples):
            params = others if i else own
            yield Request(id=request_id, prompt=self.prompt, params=params, seed=seed, arrival=self.arrival)


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Start these samples."""

    groups: list[Group]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop these samples. With `report`, each one that was still running ends with `finish_reason` abort."""

    ids: list[str]
    report: bool = False


class Call(msgspec.Struct, tag=True, frozen=True):
    """Run a control method between two steps; answered by the `Reply` with the same id."""

    id: int
    method: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process; running samples are dropped."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """One line of the start-up story; `total` 0 means that `done` counts nothing."""

    stage: str
    done: int = 0
    total: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The start was refused, with every reason."""

    problems: list[Problem]


class Misused(msgspec.Struct, tag=True, frozen=True):
    """The start ends for a reason that is the user's to mend: `kind` is a key of `USERS_ERRORS`."""

    kind: str
    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine met an error that it did not expect and is about to end."""

    message: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine runs."""

    info: EngineInfo


class Updates(msgspec.Struct, tag=True, frozen=True):
    """What one step produced."""

    updates: list[TokenUpdate]


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The engine refuses one request (a `RequestError`); nobody else is affected."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The result of a `Call`, or the error that it raised."""

    id: int
    result: Any = None
    error: str | None = None


ToEngine = Submit | Abort | Call | Shutdown
FromEngine = Progress | Refused | Misused | Failed | Ready | Updates | Rejected | Reply

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes that put `message` on the pipe."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """Bytes that follow a frame's header."""
    return int(_LENGTH.unpack(header)[0])


class PipeClosedError(Exception):
    """The other process is gone."""


class Pipe:
    """One end of the socket pair, blocking, for the engine process and for the parent while it waits for the start."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: ToEngine | FromEngine) -> None:
        """Write one message. Raises PipeClosedError when nobody reads any more."""
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            raise PipeClosedError from error

    def receive(self, *, wait: bool) -> list[bytes]:
        """The bodies of all complete frames that have arrived; with `wait`, at least one. Raises PipeClosedError."""
        frames = self._complete_frames()
        while True:
            ready, _, _ = select.select([self._socket], [], [], None if wait and not frames else 0)
            if not ready:
                return frames
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise PipeClosedError from error
            if not data:
                raise PipeClosedError
            self._buffer += data
            frames += self._complete_frames()

    def receive_one(self) -> bytes:
        """The body of the next frame, reading not a byte beyond it, so that another reader can take over."""
        return self._exactly(frame_length(self._exactly(LENGTH_BYTES)))

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = self._socket.recv(min(count, _READ_BYTES))
            except OSError as error:
                raise PipeClosedError from error
            if not part:
                raise PipeClosedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _complete_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + frame_length(self._buffer[start : start + LENGTH_BYTES])
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + LENGTH_BYTES : end]))
            start = end
        del self._buffer[:start]
        return frames
