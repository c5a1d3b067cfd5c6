"""Text and token ids in the HTTP process: prompts in, token strings out. Knows no request and imports no torch."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.chat import ChatTemplate
from tokenspeed.errors import RequestError
from tokenspeed.server.errors import ApiError
from tokenspeed.server.limits import Limits
from tokenspeed.tokenizer import Detokenizer, Tokenizer

# Encoding a batch releases the GIL; below this size the hop to a thread costs more than it saves.
_THREAD_CHARS = 2048


class TextService:
    """One tokenizer and one chat template for all requests."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. A text that cannot fit is refused unread: no token is longer than the longest one.

        Raises ContextOverflow.
        """
        longest_text = max(map(len, texts))
        if longest_text > self._limits.max_model_len:
            least = -(-longest_text // self._longest_token_chars)
            if least > self._limits.max_model_len:
                raise self._limits.overflow(f"at least {least}")
        if sum(map(len, texts)) < _THREAD_CHARS:
            return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`, as a reply would show it."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def _longest_token_chars(self) -> int:
        # A token of n bytes stands for at most n characters.
        return max((len(self.token_bytes(token)) for token in range(self._tokenizer.vocab_size)), default=1) or 1

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer."""
        return self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._tokenizer.token_bytes(token)

    def token_text(self, token: int) -> str:
        """One token as text; one that is not complete UTF-8 as `bytes:\\xe2\\x80`, the way OpenAI writes it."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt that the model's chat template makes of `messages`. Raises RequestError or ApiError."""
        if self._template is None:
            message = "this model has no chat template; use /v1/completions, or start the server with --chat-template"
            raise ApiError(400, message, param="messages", reason="no_chat_template")
        try:
            return self._template.render([plain_message(message) for message in messages], **options)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param or "messages", reason=error.code) from None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message with its content as one string; parts that are not text are refused. Raises ApiError."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(400, "`messages`: every message needs a `role`", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, "`messages`: `content` must be a string or a list of text parts", param="messages")
    return {**message, "content": content}


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = str(part.get("type"))[:32] if isinstance(part, dict) else type(part).__name__
    raise ApiError(400, f"`messages`: content parts must be text; {kind!r} is not supported", param="messages")
