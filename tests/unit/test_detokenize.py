"""Incremental text equals decoding everything at once, for every kind of decoder, and never shows half a character."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenspeed.tokenizer import Tokenizer

TEXT = [
    "Hello, world",
    "naïve café",
    "日本語のテキスト",
    "emoji 😀👩‍👩‍👧‍👦 🇩🇪 done",
    "tabs\tand\nlines",
    "e\u0301 and \u00e9",
]


def byte_level() -> Backend:
    """All 256 bytes as single tokens, a few merges, a special token and a plain added token with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = [("H", "e"), ("l", "l"), ("Ġ", "w"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("two words", special=False)])
    return backend


def sentencepiece(decoder: decoders.Decoder | None = None) -> Backend:
    """Words with `▁`, all raw bytes as `<0xNN>`, and specials, as Llama 2 has them."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁▁", "▁Hello", "▁wor", "ld", ",", "▁caf", "é", "日本", "x", "▁x▁y"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def gemma() -> Backend:
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Backend:
    return sentencepiece(decoders.Metaspace())


def wordpiece() -> Backend:
    """A decoder that no table covers."""
    pieces = ["[UNK]", "hello", "##lo", "wor", "##ld", ",", "caf", "##é"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


KINDS = {f.__name__: f for f in (byte_level, sentencepiece, gemma, metaspace, wordpiece)}


def raw_bytes(backend: Backend, data: bytes) -> list[int]:
    """The ids of `<0xNN>` tokens."""
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [i for i in ids if i is not None]


def grow(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> tuple[str, list[str]]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.finish())
    return "".join(pieces), pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_add_up_to_the_full_decode(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    rng = random.Random(7)
    size = tokenizer.vocab_size
    for _ in range(300):
        # Ids past the end too: a model's logits may have more columns than its tokenizer has tokens.
        ids = [rng.randrange(size + 3) for _ in range(rng.randrange(1, 24))]
        assert grow(tokenizer, ids, skip=skip)[0] == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma"])
@pytest.mark.parametrize("text", TEXT)
def test_real_text_comes_in_whole_characters(kind: str, text: str) -> None:
    backend = KINDS[kind]()
    if kind == "byte_level":
        ids = backend.encode(text).ids
    else:
        ids = raw_bytes(backend, text.encode())
    tokenizer = Tokenizer(backend)
    whole, pieces = grow(tokenizer, ids, skip=True)
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a😀b")
    _, pieces = grow(tokenizer, ids, skip=True)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_a_run_of_raw_bytes_is_judged_as_a_whole() -> None:
    tokenizer = Tokenizer(sentencepiece())
    backend = sentencepiece()
    emoji = raw_bytes(backend, "😀".encode())
    broken = [*emoji, emoji[0]]
    assert grow(tokenizer, emoji, skip=True)[0] == "😀"
    assert grow(tokenizer, broken, skip=True)[0] == "\ufffd" * 5 == tokenizer.decode(broken)


def test_unfinished_characters_show_at_the_end_only() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("x😀")[:-1]
    whole, pieces = grow(tokenizer, ids, skip=True)
    assert whole == "x\ufffd" == tokenizer.decode(ids)
    assert pieces[-1] == "\ufffd"


def test_token_bytes() -> None:
    tokenizer = Tokenizer(byte_level())
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("naïve 😀")) == "naïve 😀".encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_bytes(-1) == b""
    backend = sentencepiece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(raw_bytes(backend, b"\xf0")[0]) == b"\xf0"
    assert tokenizer.token_bytes(backend.token_to_id("▁Hello") or 0) == b" Hello"
