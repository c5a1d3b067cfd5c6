"""Connections that never come to an end, or are no HTTP: each is bounded, answered and closed."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from tokenspeed.server import connection
from tokenspeed.server.connection import MAX_HEAD_BYTES, Connection

SECONDS = 0.4
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and answers with its size and the number of headers, `/slow` a second later."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * SECONDS)
    body = json.dumps([size, len(scope["headers"])]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """`await connect()` opens a connection to a server whose patience is short."""
    monkeypatch.setattr(connection, "REQUEST_SECONDS", SECONDS)
    options: dict[str, Any] = {"http": Connection, "lifespan": "off", "log_config": None, "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(application, port=0, timeout_keep_alive=1, **options))
    running = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    writers = []

    async def connect() -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", port)
        writers.append(streams[1])
        return streams

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        server.should_exit = True
        await running


async def rest(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Everything until the server closes, which must happen within `seconds`."""
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    except ConnectionResetError:
        return b""


def refusal(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    assert error["code"] == int(head.split()[1])
    return error["code"], error["message"]


@pytest.mark.parametrize(
    "begin", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["line", "header", "headers"]
)
def test_a_head_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(begin)
            piece = b"x-a: b\r\n" * 512 if begin.endswith(b"\n") else b"a" * 4096
            for _ in range(MAX_HEAD_BYTES // len(piece) + 1):
                writer.write(piece)
                await writer.drain()
            assert refusal(await rest(reader, 5)) == (
                431,
                f"the request's line and headers are larger than {MAX_HEAD_BYTES} bytes",
            )

    asyncio.run(run())


def test_a_large_head_and_a_larger_body_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            size = 4 * MAX_HEAD_BYTES
            head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * (MAX_HEAD_BYTES // 2)
            writer.write(head + b"\r\ncontent-length: %d\r\n\r\n" % size + b"b" * size)
            assert (await rest(reader, 5)).endswith(b"[%d, 4]" % size)

    asyncio.run(run())


def test_trailers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(CHUNKED + b"2\r\nab\r\n0\r\n" + b"x-trailer: a\r\n" * 1000 + b"\r\n")
            assert (await reader.readuntil(b"]")).endswith(b"[2, 2]")

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [b"GET / HT", b"GET / HTTP/1.1\r\nhost:", CHUNKED, CHUNKED + b"2\r\na"],
    ids=["line", "head", "body", "chunk"],
)
def test_a_request_that_is_never_complete_runs_out_of_time(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A byte now and then does not help."""

    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(data[:-1])
            await asyncio.sleep(SECONDS / 2)
            writer.write(data[-1:])
            assert refusal(await rest(reader, SECONDS))[0] == 408

    asyncio.run(run())


@pytest.mark.parametrize("data", [b"", b"\r\n"], ids=["silence", "empty lines"])
def test_a_connection_without_a_request_is_idle(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(data)
            assert await rest(reader, 3) == b""

    asyncio.run(run())


def test_a_late_second_request_does_not_cut_off_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HT")
            reply = await rest(reader, 6 * SECONDS)
            first, _, second = reply.partition(b"[0, 1]")
            assert first.startswith(b"HTTP/1.1 200")
            assert refusal(second)[0] == 408

    asyncio.run(run())


def test_slow_replies_and_idle_connections_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            for path in (b"/slow", b"/"):
                writer.write(GET.replace(b"/ ", path + b" "))
                assert (await reader.readuntil(b"]")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(1.5 * SECONDS)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00", b"BREW / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx y: z\r\n\r\n"]
)
def test_what_is_no_http_gets_an_openai_body(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(data)
            assert refusal(await rest(reader, 5))[0] == 400

    asyncio.run(run())


def test_a_request_for_another_protocol_is_answered_as_http(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as connect:
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            assert (await reader.readuntil(b"]")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())
    assert "pip install" not in caplog.text


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: heard.append(limits))
    for limits in [(1024, 4096), (1024, resource.RLIM_INFINITY), (1 << 20, 1 << 20), (4096, 4096)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _what, limits=limits: limits)
        connection.raise_file_limit()
    assert heard == [(4096, 4096), (1 << 16, resource.RLIM_INFINITY)]
