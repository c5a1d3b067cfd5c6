"""One client's connection: uvicorn's, with bounds on what a request may take before any route sees it.

The head of a request is bounded in bytes and a whole request in seconds, so that a client that never comes to an end
holds neither memory nor, for long, one of the process's file descriptors. What is no HTTP gets an OpenAI body, too.
"""

from __future__ import annotations

import asyncio
import resource
from asyncio.events import TimerHandle
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenspeed.server.errors import ApiError, error_response

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers; what proxies allow at most."""

REQUEST_SECONDS = 300.0
"""How long a client may take to send a request: the largest body, over a line of a megabit a second."""

_FILES = 1 << 16


def raise_file_limit() -> None:
    """Let this process have as many connections as the system allows; by default that is often a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connection(HttpToolsProtocol):
    """A connection is idle (bounded by uvicorn's keep-alive timeout), receives a request, or waits for its reply."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head = False
        self._deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            self._end_deadline()
        elif self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's line and headers are larger than {MAX_HEAD_BYTES} bytes")
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_request()  # nothing but empty lines so far

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer: nobody reads those, and there may be any number of them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end_deadline()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        """A request to change the protocol is answered as if it had not asked; that is no concern of the log."""

    def _expect_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_deadline(self) -> None:
        self._end_deadline()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._out_of_time)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _out_of_time(self) -> None:
        is_answering = self._in_head and self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.pipeline:  # an earlier request of this connection, whose reply must not be cut off
            self._start_deadline()
        else:
            self._refuse(408, f"the request was not complete after {REQUEST_SECONDS:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; only close where a reply is on its way already."""
        self._end_deadline()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            reply = error_response(ApiError(status, message))
            head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
            head += [name + b": " + value for name, value in reply.raw_headers]
            self.transport.write(b"\r\n".join([*head, b"", bytes(reply.body)]))
        self.transport.close()
