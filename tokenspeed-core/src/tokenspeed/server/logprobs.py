"""Log-probabilities as JSON: a float32 goes out as the shortest text of the double that holds it; its bits survive.

Large jobs may ask for them as base64 of little-endian float32 arrays instead, which costs no parsing.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal

from tokenspeed.engine.request import PositionLogprobs, SamplingParams, TokenLogprob
from tokenspeed.server.errors import ApiError
from tokenspeed.server.text import TextService

MINUS_INFINITY = -9999.0
"""What stands for -inf, which JSON cannot write; the value that vLLM sends."""


LogprobsEncoding = Literal["float", "base64"]
"""How log-probabilities are written; `float` if not given."""


def check_encoding(encoding: LogprobsEncoding | None, params: SamplingParams) -> None:
    """Refuse what has no place in an array of one number for each token. Raises ApiError."""
    more = bool(params.logprobs) or bool(params.prompt_logprobs) or bool(params.logprob_token_ids)
    if encoding == "base64" and more:
        message = "`logprobs_encoding`: base64 holds the tokens' own logprobs; ask for 0 alternatives, or for float"
        raise ApiError(400, message, param="logprobs_encoding", reason="unsupported_field")


def base64_logprobs(entries: Sequence[PositionLogprobs | None]) -> str:
    """The tokens' logprobs as base64 of a little-endian float32 array; NaN for an entry of None, -inf as it is.

    Raises ApiError when the model produced NaN.
    """
    values = [math.nan if entry is None else entry.token.logprob for entry in entries]
    for entry, value in zip(entries, values, strict=True):
        if entry is not None:
            json_logprob(value)
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def json_logprob(value: float) -> float:
    """`value` as JSON can hold it. Raises ApiError for NaN: a number is never made up."""
    if math.isnan(value):
        raise ApiError(500, "the model produced a log-probability that is not a number", reason="nan_logprob")
    return MINUS_INFINITY if value == -math.inf else value


class LogprobWriter:
    """Writes one sample's logprobs in the shapes of the OpenAI routes, chunk by chunk.

    With `ids_as_tokens` every token string is `token_id:N`. Text offsets count the characters that the reply has shown
    before each token, `start` included.
    """

    def __init__(self, text: TextService, *, ids_as_tokens: bool, skip_special_tokens: bool, start: int = 0) -> None:
        self._text = text
        self._ids_as_tokens = ids_as_tokens
        self._stream = text.detokenizer(skip_special_tokens=skip_special_tokens)
        self._offset = start

    def completion(self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None]) -> dict[str, list[Any]]:
        """The four parallel lists of a completion. An entry is None for the first token of a prompt."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._name(token))
            text_offset.append(self._offset)
            self._offset += len(self._stream.push(token))
            token_logprobs.append(None if entry is None else json_logprob(entry.token.logprob))
            top_logprobs.append(None if entry is None else self._table(entry))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def chat(self, entries: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
        """The `content` list of a chat completion."""
        return [
            {**self._chat_token(entry.token), "top_logprobs": [self._chat_token(other) for other in entry.top]}
            for entry in entries
        ]

    def prompt(self, entries: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: token id → record, the prompt's own token first; None for the first position."""
        return [None if entry is None else self._prompt_table(entry) for entry in entries]

    def _prompt_table(self, entry: PositionLogprobs) -> dict[str, Any]:
        return {
            str(item.id): {
                "logprob": json_logprob(item.logprob),
                "rank": item.rank,
                "decoded_token": self._text.token_text(item.id),
            }
            for item in _distinct(entry)
        }

    def _table(self, entry: PositionLogprobs) -> dict[str, float]:
        """Token string → logprob, the sampled token first; a string that two ids share is spelled by id once taken."""
        table: dict[str, float] = {}
        for item in _distinct(entry):
            name = self._name(item.id)
            table[name if name not in table else f"token_id:{item.id}"] = json_logprob(item.logprob)
        return table

    def _chat_token(self, item: TokenLogprob) -> dict[str, Any]:
        raw = list(self._text.token_bytes(item.id))
        return {"token": self._name(item.id), "logprob": json_logprob(item.logprob), "bytes": raw}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids_as_tokens else self._text.token_text(token)


def cut(entries: Sequence[PositionLogprobs | None], top: int) -> list[PositionLogprobs | None]:
    """`entries` with at most `top` alternatives each; -1 keeps all."""
    if top < 0:
        return list(entries)
    return [None if entry is None else PositionLogprobs(entry.token, entry.top[:top]) for entry in entries]


def _distinct(entry: PositionLogprobs) -> list[TokenLogprob]:
    """The actual token, then the alternatives without it."""
    return [entry.token, *(item for item in entry.top if item.id != entry.token.id)]
