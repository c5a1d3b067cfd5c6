"""From a started engine to a served one: the listening socket, uvicorn, and an orderly end.

The first SIGINT or SIGTERM drains: new requests get 503, running ones may finish within the time limit and are then
ended with `finish_reason` abort. The second one ends them at once, the third does not wait for anything.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from tokenspeed.chat import ChatTemplate, given_template
from tokenspeed.config import EngineConfig
from tokenspeed.engine.process import EngineProcess
from tokenspeed.engine.wire import EngineInfo
from tokenspeed.errors import ConfigError
from tokenspeed.loading.generation_config import sampling_defaults
from tokenspeed.server.app import create_app
from tokenspeed.server.client import EngineClient
from tokenspeed.server.connection import Connection, raise_file_limit
from tokenspeed.server.limits import Limits
from tokenspeed.server.service import Service, ServiceOptions
from tokenspeed.server.text import TextService
from tokenspeed.tokenizer import Tokenizer

_log = logging.getLogger("tokenspeed.server")
_KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than pools of clients keep theirs (httpx 5 s, aiohttp 15 s, proxies
60 s), so that it is not closed at the moment when a client sends its next request on it."""

_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)

_BACKLOG = 2048
"""Connections that may wait to be accepted."""

_LAST_WORDS_SECONDS = 5
"""How long replies that have been ended may take to reach their clients."""


@dataclass(frozen=True)
class Listener:
    """A bound socket that does not listen yet, so that a taken port is known before anything is loaded."""

    sock: socket.socket

    @classmethod
    def bind(cls, host: str, port: int) -> Listener:
        """Raises ConfigError when the address cannot be had."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError as error:
            way_out = "choose another port" if error.errno in _PORT_ERRORS else "give an address of this machine"
            raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; {way_out}") from None
        sock.setblocking(False)
        return cls(sock)

    def listen(self) -> None:
        """Queue connections from now on. Raises ConfigError when another process came first.

        Two sockets may be bound to one address while neither listens, so two starts at once get this far.
        """
        host, port = self.sock.getsockname()[:2]
        try:
            self.sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror}; choose another port") from None

    @property
    def is_loopback(self) -> bool:
        """Only this machine can connect."""
        return ipaddress.ip_address(self.sock.getsockname()[0]).is_loopback

    @property
    def url(self) -> str:
        """`http://127.0.0.1:8000`; an address of all interfaces is spelled as one that works here."""
        address = ipaddress.ip_address(self.sock.getsockname()[0])
        host = "localhost" if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
        return f"http://{host}:{self.sock.getsockname()[1]}"


def make_service(config: EngineConfig, process: EngineProcess, info: EngineInfo, *, is_loopback: bool) -> Service:
    """The service around a started engine; reads the tokenizer and the chat template. Raises CheckpointError."""
    tokenizer = Tokenizer.from_directory(config.tokenizer or info.model_path)
    given = given_template(config)
    source = tokenizer.chat_template if given is None else given
    limits = Limits(
        engine=info.limits,
        logprobs_mode=info.logprobs_mode,
        max_in_flight=config.max_in_flight,
        max_body_bytes=config.max_body,
        defaults=sampling_defaults(Path(info.model_path), config.generation_config),
    )
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    options = ServiceOptions(
        model_names=config.served_model_name or (config.model,),
        api_keys=config.api_key,
        control_key=config.control_key,
        is_loopback=is_loopback,
        metrics_compat=config.metrics_compat,
        public=config.public(),
    )
    return Service(EngineClient(process, info), TextService(tokenizer, template, limits), limits, options)


class Server(uvicorn.Server):
    """uvicorn with a drain. `on_listening` runs once requests are accepted, `say` tells the user what happens."""

    def __init__(
        self,
        service: Service,
        *,
        log_level: str,
        drain_timeout_seconds: float,
        on_listening: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Connection,
                log_config=None,
                # What uvicorn would say of its start and end is printed by the caller already.
                log_level="warning" if log_level == "info" else log_level,
                access_log=log_level == "debug",
                lifespan="on",
                ws="none",
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
            )
        )
        self._service = service
        self._drain_timeout_seconds = drain_timeout_seconds
        self._on_listening = on_listening
        self._say = say
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        self._loop = asyncio.get_running_loop()
        raise_file_limit()
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal arrived, in the middle of anything: hand it to the event loop."""
        self._signals += 1
        if self._signals > 2 or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain if self._signals == 1 else self._end_now)

    def _begin_drain(self) -> None:
        self._service.draining = True
        self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        running = self._service.client.in_flight
        if running:
            limit = self._drain_timeout_seconds
            self._say(f"draining: {running} samples may finish within {limit:g} s; a second signal ends them now")
            if not await self._service.drain(limit):
                self._end_now()
        self.should_exit = True

    def _end_now(self) -> None:
        if self._service.client.dead is None:
            ended = self._service.abort()
            if ended:
                self._say(f"ended {ended} samples with finish_reason abort")
        self.should_exit = True
