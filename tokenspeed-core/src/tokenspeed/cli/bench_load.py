"""The load of `bench serve`: prompts, arrivals, and a lean HTTP client that times every token. Knows no report."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import msgspec

from tokenspeed.errors import TokenspeedError
from tokenspeed.server_url import ServerUrl

# Every vocabulary has these ids, and they are rarely special: single bytes and characters in most tokenizers.
_LOWEST_ID, _HIGHEST_ID = 16, 255


class LoadError(TokenspeedError):
    """The server does not answer as it should."""


@dataclass(frozen=True)
class Prompt:
    """One request: text or token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_tokens: int


@dataclass
class Outcome:
    """What one request measured. Times are seconds; `started` is on `time.perf_counter`'s clock."""

    started: float
    input_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""


def random_prompts(
    count: int, input_tokens: int, output_tokens: int, *, ratio: float, seed: int, as_text: bool
) -> list[Prompt]:
    """Random token ids (or words); lengths vary evenly by `ratio` of the given ones."""
    numbers = random.Random(seed)

    def length(mean: int) -> int:
        spread = int(mean * ratio)
        return max(1, numbers.randint(mean - spread, mean + spread))

    prompts = []
    for _ in range(count):
        ids = [numbers.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(length(input_tokens))]
        prompts.append(Prompt(" ".join(map(str, ids)) if as_text else ids, length(output_tokens)))
    return prompts


def custom_prompts(path: Path, count: int, output_tokens: int) -> list[Prompt]:
    """The first `count` lines of a JSONL file of `{"prompt", "output_tokens"}`. Raises LoadError."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines[:count], start=1):
        try:
            record = json.loads(line)
            prompts.append(Prompt(record["prompt"], int(record.get("output_tokens", output_tokens))))
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{path} line {number}: expected an object with `prompt`: {error!r}") from None
    if not prompts:
        raise LoadError(f"{path} holds no prompt")
    return prompts


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent: gamma-distributed gaps, Poisson when `burstiness` is 1."""
    if rate == float("inf"):
        return [0.0] * count
    numbers = random.Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += numbers.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


class Load:
    """Sends prompts to one route and times what comes back. `model` is looked up when None."""

    def __init__(
        self,
        *,
        base_url: str,
        endpoint: str,
        is_chat: bool,
        model: str | None,
        api_key: str | None,
        ignore_eos: bool,
        temperature: float | None,
    ) -> None:
        self.model = model
        server = ServerUrl.read(base_url)
        self._host, self._port, self._base = server.host, server.port, server.path
        self._tls = ssl.create_default_context() if server.is_tls else None
        self._endpoint = endpoint
        self._is_chat = is_chat
        self._key = api_key
        self._ignore_eos = ignore_eos
        self._temperature = temperature

    async def find_model(self) -> None:
        """Ask the server for its model unless one was given. Raises LoadError."""
        if self.model is not None:
            return
        try:
            body = b"".join([part async for part in self._exchange("GET", "/v1/models", None)])
            self.model = str(msgspec.json.decode(body)["data"][0]["id"])
        except (OSError, LoadError, msgspec.DecodeError, KeyError, IndexError) as error:
            raise LoadError(f"http://{self._host}:{self._port}/v1/models: {error}") from None

    async def send_all(
        self,
        prompts: Sequence[Prompt],
        at: Sequence[float],
        max_concurrency: int | None,
        advance: Callable[[], None],
    ) -> list[Outcome]:
        """One outcome for each prompt, in order; `at` says when each is sent."""
        seats = asyncio.Semaphore(max_concurrency or len(prompts))
        began = time.perf_counter()

        async def one(prompt: Prompt, start: float) -> Outcome:
            await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
            async with seats:
                outcome = await self.send(prompt)
            advance()
            return outcome

        return await asyncio.gather(*(one(prompt, start) for prompt, start in zip(prompts, at, strict=True)))

    async def send(self, prompt: Prompt) -> Outcome:
        """Stream one reply; what goes wrong is the outcome's `error`."""
        outcome = Outcome(started=time.perf_counter())
        last = outcome.started
        try:
            async for chunk in _events(self._exchange("POST", self._endpoint, self._body(prompt))):
                if chunk.get("error"):
                    raise LoadError(str(chunk["error"].get("message")))
                if usage := chunk.get("usage"):
                    outcome.input_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                text = self._text(chunk)
                if text is not None:
                    now = time.perf_counter()
                    if outcome.ttft:
                        outcome.itls.append(now - last)
                    else:
                        outcome.ttft = now - outcome.started
                    last = now
                    outcome.text += text
            if not outcome.ttft:
                raise LoadError("the reply had no token")
        except (OSError, EOFError, LoadError, msgspec.DecodeError, httptools.HttpParserError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.latency = last - outcome.started
        return outcome

    def _body(self, prompt: Prompt) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": prompt.prompt}]
        else:
            body["prompt"] = prompt.prompt
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._temperature is not None:
            body["temperature"] = self._temperature
        return msgspec.json.encode(body)

    def _text(self, chunk: dict[str, Any]) -> str | None:
        """The new text of a chunk; None for one that brings no token."""
        for choice in chunk.get("choices") or ():
            if not self._is_chat:
                return str(choice.get("text") or "")
            if "role" not in choice["delta"]:
                return str(choice["delta"].get("content") or "")
        return None

    async def _exchange(self, method: str, path: str, body: bytes | None) -> AsyncIterator[bytes]:
        """The parts of a reply's body as they arrive, over a connection of its own. Raises LoadError for a status."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            head = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close"]
            head += [f"Authorization: Bearer {self._key}"] if self._key else []
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body is not None else []
            writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
            reply = _Reply()
            parser = httptools.HttpResponseParser(reply)
            while not reply.is_complete:
                data = await reader.read(1 << 16)
                if not data:
                    raise EOFError("the server closed the connection")
                parser.feed_data(data)
                if reply.parts and parser.get_status_code() == 200:
                    yield b"".join(reply.take())
            if parser.get_status_code() != 200:
                raise LoadError(
                    f"HTTP {parser.get_status_code()}: {b''.join(reply.take())[:500].decode(errors='replace')}"
                )
        finally:
            writer.close()


class _Reply:
    """Collects what httptools parses."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take(self) -> list[bytes]:
        taken, self.parts = self.parts, []
        return taken


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream, without comments and the final `[DONE]`."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip()
            if data.startswith(b"data:") and (content := data[5:].strip()) != b"[DONE]":
                yield msgspec.json.decode(content)
