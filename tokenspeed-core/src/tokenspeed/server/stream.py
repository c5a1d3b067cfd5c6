"""Server-sent events, and giving up on work whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from tokenspeed.errors import EngineDead
from tokenspeed.server.errors import as_api_error, error_body, error_response

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("tokenspeed.server")
_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client closed its connection before the reply was complete."""


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientGoneError then.

    Call it only when the request's body has been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def reply(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, or an unread one when the client has gone meanwhile."""
    try:
        return await until_disconnect(request.receive, work)
    except ClientGoneError:
        return Response(status_code=499)


class EventStream(Response):
    """Sends encoded events as they come. The status goes out with the first one, so an error before it is a plain 4xx;
    a later one becomes an `error` event and the stream still ends with `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                _note(error)
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send(send, first)
            try:
                async for data in events:
                    await _send(send, data)
            except OSError:
                raise
            except Exception as error:
                _note(error)
                known = as_api_error(error)
                await _send(send, event(error_body(known.status_code, str(known.detail), known.param, known.reason)))
            await _send(send, DONE)
            await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _note(error: Exception) -> None:
    """Log what is nobody's fault but ours. The end of the engine is logged once, not for each of its streams."""
    if as_api_error(error).status_code >= 500 and not isinstance(error, EngineDead):
        _log.error("a stream failed: %s", error, exc_info=error)
