"""Text to token ids and back: a `tokenizers` tokenizer, its chat template, and text as it grows.

Knows files of a checkpoint (`tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
`chat_template.jinja`); knows nothing of requests. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from tokenspeed.detokenize import Detokenizer, PieceTable
from tokenspeed.errors import CheckpointError, RequestError
from tokenspeed.loading.json_file import is_listed, read_json_if_any, read_text

__all__ = ["Detokenizer", "Tokenizer"]


class Tokenizer:
    """The tokenizer of one checkpoint."""

    def __init__(
        self,
        backend: _Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        # A tokenizer.json may carry padding and truncation from its training; a prompt is never changed silently.
        backend.no_padding()
        backend.no_truncation()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._table = PieceTable(backend)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read a checkpoint's tokenizer. Raises CheckpointError when `tokenizer.json` is missing or broken."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json; save a fast tokenizer there (transformers: "
                f"AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            backend = _Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer that the tokenizers package can read: {error}") from error
        config = read_json_if_any(directory / "tokenizer_config.json")
        special = _special_tokens(read_json_if_any(directory / "special_tokens_map.json")) | _special_tokens(config)
        return cls(backend, special_tokens=special, chat_template=_chat_template(directory, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token, added ones included; a model's logits may have more columns."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens, those that the tokenizer's template adds (a leading BOS).

        Raises RequestError for a text that UTF-8 cannot spell.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # the backend's word for what UTF-8 cannot spell
            message = "the text holds half of a surrogate pair, which is no character"
            raise RequestError(message, param="prompt", code="invalid_value") from None
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        found = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Raises RequestError for a negative id; ids without a token add nothing."""
        if any(i < 0 for i in ids):
            raise RequestError("tokens: ids must not be negative", param="tokens", code="token_out_of_vocabulary")
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder: what it emits adds up to `decode` of the same ids."""
        return self._table.detokenizer(skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token's own spelling in the vocabulary (`Ġthe`), or None for an id without a token."""
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token stands for inside a text; part of a character at times."""
        return self._table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as a string for people and for logprob tables; U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … of a config file; a token is its text, or an object with the text as `content`."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja`, else tokenizer_config.json's `chat_template` (of several, the one named `default`)."""
    path = directory / "chat_template.jinja"
    if is_listed(path):
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        found = type(template).__name__
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: chat_template should be a text, not {found}")
    return template
