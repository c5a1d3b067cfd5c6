"""Token ids to text as it grows: complete characters only, and the pieces add up to decoding everything at once.

A tokenizer's decoder is recognised once and turned into a table, so a token costs one look-up:

* byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8;
* SentencePiece style (Llama 2, Mistral, Gemma): a token is text with `▁` for a space, or one raw byte `<0x0A>`; a run
  of raw bytes is text if the whole run is valid UTF-8 and one U+FFFD for each byte otherwise, so a run is held until it
  ends: what was shown is never taken back;
* anything else is decoded by the tokenizer itself in a short window.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer as _Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
# The tail of a window that ends inside a character stays undecoded; after so many tokens it is no character any more.
_LONGEST_CHARACTER_TOKENS = 4


class Detokenizer(Protocol):
    """Incremental decoder of one text."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        ...

    def finish(self) -> str:
        """What was held back; parts of characters become U+FFFD."""
        ...


class PieceTable:
    """What each id stands for, found on first use; shared by all texts of one tokenizer."""

    def __init__(self, backend: _Tokenizer) -> None:
        self._backend = backend
        settings = json.loads(backend.to_str())
        self._special = {token["id"] for token in settings["added_tokens"] if token["special"]}
        self._pieces: dict[int, bytes] = {}
        decoder = settings["decoder"] or {}
        rules = _SentencePieceRules.of(decoder)
        self._make: Callable[[frozenset[int]], Detokenizer]
        self._spell: Callable[[str], bytes]
        if _is_byte_level(decoder):
            self._spell = _byte_level_bytes
            self._make = lambda skipped: _ByteLevelText(self.token_bytes, skipped)
        elif rules is not None:
            table = _SentencePieceTable(backend, rules)
            self._spell = table.spell
            self._make = lambda skipped: _SentencePieceText(table, skipped)
        else:
            self._spell = str.encode
            self._make = lambda skipped: _WindowText(backend, skipped)
        self._skipped = frozenset(self._special)

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A decoder of one new text."""
        return self._make(self._skipped if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that has no token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            piece = self._pieces[token_id] = b"" if token is None else self._spell(token)
        return piece


class _ByteLevelText:
    __slots__ = ("_bytes_of", "_decode", "_skipped")

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class _SentencePieceRules:
    """What a SentencePiece-style decoder does: `spaces` become spaces, `strip` leading spaces of the text go.

    `drop_first_spaces` (the Metaspace decoder) removes every `spaces` of the first token instead of replacing it.
    """

    def __init__(self, spaces: str, *, byte_fallback: bool, strip: int, drop_first_spaces: bool) -> None:
        self.spaces = spaces
        self.byte_fallback = byte_fallback
        self.strip = strip
        self.drop_first_spaces = drop_first_spaces

    @classmethod
    def of(cls, decoder: dict[str, Any]) -> _SentencePieceRules | None:
        """The rules of a `decoder` section, or None when it does something else."""
        if decoder.get("type") == "Metaspace":
            drop = decoder.get("prepend_scheme", "always") != "never"
            return cls(decoder["replacement"], byte_fallback=False, strip=0, drop_first_spaces=drop)
        if decoder.get("type") != "Sequence":
            return None
        steps = list(decoder["decoders"])
        if not steps or steps[0]["type"] != "Replace" or steps[0]["content"] != " ":
            return None
        spaces = steps.pop(0)["pattern"].get("String")
        kinds = [step["type"] for step in steps]
        if not spaces or kinds not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"], []):
            return None
        strip = 0
        if kinds[-1:] == ["Strip"]:
            if steps[-1]["content"] != " " or steps[-1]["stop"]:
                return None
            strip = steps[-1]["start"]
        return cls(spaces, byte_fallback="ByteFallback" in kinds, strip=strip, drop_first_spaces=False)


class _SentencePieceTable:
    """id -> text, or the value of a raw byte."""

    def __init__(self, backend: _Tokenizer, rules: _SentencePieceRules) -> None:
        self._backend = backend
        self.rules = rules
        self._pieces: dict[int, str | int | None] = {}

    def piece(self, token_id: int) -> str | int | None:
        """Text of a token, or its value when it is a raw byte; None for an id that has no token."""
        if token_id not in self._pieces:
            token = self._backend.id_to_token(token_id)
            self._pieces[token_id] = None if token is None else self._piece_of(token)
        return self._pieces[token_id]

    def first_piece(self, token_id: int) -> str | int | None:
        """Like `piece`, for the first token of a text."""
        token = self._backend.id_to_token(token_id)
        if token is None or not self.rules.drop_first_spaces:
            return self.piece(token_id)
        return str(token).replace(self.rules.spaces, "")

    def spell(self, token: str) -> bytes:
        """Bytes of a token."""
        piece = self._piece_of(token)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def _piece_of(self, token: str) -> str | int:
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token.replace(self.rules.spaces, " ")


class _SentencePieceText:
    __slots__ = ("_run", "_skipped", "_started", "_strip", "_table")

    def __init__(self, table: _SentencePieceTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._strip = table.rules.strip
        self._started = False
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._started:
            piece = self._table.piece(token_id)
        else:
            piece = self._table.first_piece(token_id)
            self._started = piece is not None
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._emit(self._end_run() + piece)

    def finish(self) -> str:
        return self._emit(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _emit(self, text: str) -> str:
        """Drop what is left of the leading spaces to strip."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


class _WindowText:
    """Decodes the tokens since the last shown boundary, with one shown token before them as context."""

    __slots__ = ("_backend", "_read", "_skipped", "_window")

    def __init__(self, backend: _Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        # An id without a token would leave the window without context.
        if token_id not in self._skipped and self._backend.id_to_token(token_id) is not None:
            self._window.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        shown = self._decode(self._window[: self._read])
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        unfinished = text.endswith(_REPLACEMENT) and pending <= _LONGEST_CHARACTER_TOKENS
        if not pending or (unfinished and not final):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte (openai/gpt-2, src/encoder.py): printable Latin-1 stands for itself,
    the other 68 bytes are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a foreign character (an added token with a space) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
