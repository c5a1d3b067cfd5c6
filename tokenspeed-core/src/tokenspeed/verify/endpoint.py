"""An OpenAI-compatible server, as a harness uses it: token ids in, token ids and logprobs out.

Works with servers that are not ours, as far as they take token-id prompts and report the logprob of each token. Knows
HTTP from the standard library only. A logprob arrives as a decimal number; its nearest fp32 is what the server held,
since a shortest decimal (of a float or of the double that holds it) reads back exactly.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.errors import TokenspeedError
from tokenspeed.server_url import ServerUrl
from tokenspeed.verify.items import Item, Outcome, float_bits

TIMEOUT_SECONDS = 600.0

_OPTIONAL = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "stop_token_ids",
    "prompt_logprobs",
)
"""Parameters that are sent only where they are not the default."""


class EndpointError(TokenspeedError):
    """The server cannot be used for this: unreachable, an error status, or a reply that lacks what is compared."""


_EXTENSIONS = ("ignore_eos", "return_tokens_as_token_ids")
"""Fields that OpenAI's own interface does not have; they are left out for a server that refuses them."""


@dataclass(frozen=True)
class Reply:
    """One choice of a reply. `seed` is what the server says it used, None when it says nothing."""

    outcome: Outcome
    seed: int | None
    fingerprint: str | None


@dataclass
class Endpoint:
    """`url` is the server's root, with or without `/v1`. `model` is asked of the server when not given.

    `names_ids` is off for a server that names tokens by their text; ids in outcomes are then digests of the text.
    """

    url: str
    api_key: str | None = None
    model: str = ""
    vocab_size: int = 0
    longest: int = 0
    fingerprint: str = ""
    is_ours: bool = False
    names_ids: bool = True
    _without: frozenset[str] = field(default=frozenset(), repr=False)
    _root: str = field(default="", repr=False)
    _server: ServerUrl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._server = ServerUrl.read(self.url)
        self._root = self.url.rstrip("/").removesuffix("/v1")

    def discover(self) -> None:
        """Ask for the model's name, the longest context and, of a server of ours, the fingerprint and vocabulary."""
        listed = self.get("/v1/models").get("data") or [{}]
        self.model = self.model or str(listed[0].get("id", ""))
        self.longest = int(listed[0].get("max_model_len") or 2048)
        try:
            numerics = self.get("/numerics")
        except EndpointError:
            return
        self.is_ours = "fingerprint" in numerics
        self.fingerprint = str(numerics.get("fingerprint", ""))

    def settle(self, item: Item) -> None:
        """Find out in which form a server that is not ours answers a plain request. EndpointError when it does not."""
        for without in (frozenset[str](), *(frozenset({name}) for name in _EXTENSIONS), frozenset(_EXTENSIONS)):
            self._without = without
            try:
                reply = self.post("/v1/completions", self._body(item))
            except EndpointError as error:
                refusal = error
                continue
            tokens = (reply["choices"][0].get("logprobs") or {}).get("tokens") or []
            self.names_ids = all(_ID.fullmatch(token) for token in tokens)
            return
        raise refusal

    def get(self, path: str) -> dict[str, Any]:
        """A JSON document."""
        with self._connection() as connection:
            return self._json(connection, "GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON document and read one."""
        with self._connection() as connection:
            return self._json(connection, "POST", path, body)

    def complete(self, item: Item, **more: Any) -> list[Reply]:
        """Every choice of one request, not streamed."""
        reply = self.post("/v1/completions", self._body(item, **more))
        usage = reply.get("usage") or {}
        fingerprint = reply.get("system_fingerprint")
        return [Reply(self._outcome(choice, usage), choice.get("seed"), fingerprint) for choice in reply["choices"]]

    def one(self, item: Item, **more: Any) -> Outcome:
        """The only choice of one request."""
        return self.complete(item, **more)[0].outcome

    def stream(self, item: Item, *, leave_after: int | None = None) -> Outcome:
        """The only choice, streamed; with `leave_after` the connection is closed after so many pieces."""
        ids: list[int] = []
        bits: list[int] = []
        reason: str | None = None
        with self._connection() as connection:
            response = self._request(connection, "POST", "/v1/completions", self._body(item, stream=True))
            for number, piece in enumerate(_events(response)):
                for choice in piece.get("choices", ()):
                    part = self._outcome(choice, {})
                    ids += part.token_ids
                    bits += part.bits
                    reason = part.finish_reason or reason
                if leave_after is not None and number + 1 >= leave_after:
                    return Outcome(tuple(ids), tuple(bits), finish_reason="abort")
        return Outcome(tuple(ids), tuple(bits), finish_reason=reason)

    def many_in_turn(self, items: list[Item]) -> Iterator[Outcome]:
        """All items, one after another."""
        return (self.one(item) for item in items)

    def many(self, items: list[Item], *, stagger_seconds: float = 0.0, concurrency: int | None = None) -> list[Outcome]:
        """All items at the same time, each over a connection of its own."""

        def run(numbered: tuple[int, Item]) -> Outcome:
            number, item = numbered
            time.sleep(number * stagger_seconds)
            return self.one(item)

        with ThreadPoolExecutor(concurrency or max(len(items), 1)) as pool:
            return list(pool.map(run, enumerate(items)))

    def _body(self, item: Item, **more: Any) -> dict[str, Any]:
        params = item.params
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(item.prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "logprobs": 1,
            "ignore_eos": params.ignore_eos,
            "return_tokens_as_token_ids": True,
        }
        # Other servers refuse fields that they do not know, and get what is not the default; ours get everything, since
        # their defaults may be a checkpoint's.
        plain = type(params)()
        for name in _OPTIONAL:
            if self.is_ours or getattr(params, name) != getattr(plain, name):
                body[name] = getattr(params, name)
        return {k: v for k, v in {**body, **more}.items() if k not in self._without and v is not None}

    def _outcome(self, choice: dict[str, Any], usage: dict[str, Any]) -> Outcome:
        return outcome_of(choice, usage, names_ids=self.names_ids)

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        server = self._server
        kind = http.client.HTTPSConnection if server.is_tls else http.client.HTTPConnection
        connection = kind(server.host, server.port, timeout=TIMEOUT_SECONDS)
        try:
            yield connection
        finally:
            connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, self._server.path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self._root}{path}: {type(error).__name__}: {error}") from error
        if response.status >= 400:
            raise EndpointError(f"{self._root}{path}: {response.status} {response.read(2000).decode(errors='replace')}")
        return response

    def _json(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        text = self._request(connection, method, path, body).read()
        try:
            value: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise EndpointError(f"{self._root}{path}: the reply is no JSON") from error
        return value


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


_ID = re.compile(r"token_id:(\d+)")


def outcome_of(choice: dict[str, Any], usage: dict[str, Any], *, names_ids: bool = True) -> Outcome:
    """One choice as bits. EndpointError when it has no token logprobs, or names a token otherwise than by its id."""
    logprobs = choice.get("logprobs") or {}
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if tokens is None or values is None:
        raise EndpointError("the reply has no token logprobs (`logprobs.tokens`, `logprobs.token_logprobs`)")
    prompt = tuple(
        float_bits(next(iter(record.values()))["logprob"]) for record in choice.get("prompt_logprobs") or () if record
    )
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        tuple(_token_id(token) if names_ids else _digest(token) for token in tokens),
        tuple(float_bits(value) for value in values),
        prompt,
        finish_reason=choice.get("finish_reason"),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def _token_id(token: str) -> int:
    found = _ID.fullmatch(token)
    if found is None:
        raise EndpointError(f"the server names the token {token!r}; `return_tokens_as_token_ids` should make it an id")
    return int(found[1])


def _digest(token: str) -> int:
    """A number for a token that is known by its text."""
    return int.from_bytes(hashlib.sha256(token.encode()).digest()[:8], "big")
