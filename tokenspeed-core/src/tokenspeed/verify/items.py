"""What a harness asks and what it gets: requests with fixed seeds, outcomes as bits, and the first difference of two.

Log-probabilities are compared as the 32 bits of their float, never as numbers.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenspeed.engine.request import PositionLogprobs, Request, SamplingParams, TokenUpdate


@dataclass(frozen=True)
class Item:
    """One request with everything that determines its reply; `params` has a seed and asks for logprobs."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def seed(self) -> int:
        """The seed of its one sample."""
        assert self.params.seed is not None
        return self.params.seed

    @property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """Equal for items that must get equal replies."""
        return self.prompt, msgspec.json.encode(self.params)

    def request(self, request_id: str) -> Request:
        """For the engine."""
        return Request(id=request_id, prompt=list(self.prompt), params=self.params, seed=self.seed)

    def but(self, name: str, *, prompt: Sequence[int] | None = None, **params: Any) -> Item:
        """A changed copy under a name of its own."""
        changed = msgspec.structs.replace(self.params, **params)
        return Item(name, self.prompt if prompt is None else tuple(prompt), changed)


@dataclass(frozen=True)
class Outcome:
    """A reply as bits: `bits[i]` is the fp32 pattern of the logprob of `token_ids[i]`.

    `prompt_bits` holds those of the prompt's tokens from the second on, where they were asked for, and `alternatives`
    (token id, fp32 pattern, rank) of every alternative of every token. What a server does not report stays empty.
    """

    token_ids: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()
    prompt_bits: tuple[int, ...] = ()
    alternatives: tuple[tuple[int, int, int], ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0


class Collector:
    """Puts the updates of one sample together."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._bits: list[int] = []
        self._prompt: list[int] = []
        self._alternatives: list[tuple[int, int, int]] = []
        self._last = TokenUpdate(id="")

    @property
    def finished(self) -> bool:
        """The last update has come."""
        return self._last.finish_reason is not None

    def add(self, update: TokenUpdate) -> None:
        """What one step added."""
        self._ids += update.token_ids
        self._bits += [float_bits(entry.token.logprob) for entry in update.logprobs or ()]
        self._prompt += _prompt_bits(update.prompt_logprobs or ())
        self._alternatives += [
            (other.id, float_bits(other.logprob), other.rank) for entry in update.logprobs or () for other in entry.top
        ]
        self._last = update

    def outcome(self) -> Outcome:
        """Everything so far."""
        last = self._last
        return Outcome(
            tuple(self._ids),
            tuple(self._bits),
            tuple(self._prompt),
            tuple(self._alternatives),
            last.finish_reason,
            last.cached_tokens,
            last.preemptions,
        )


def _prompt_bits(entries: Iterable[PositionLogprobs | None]) -> list[int]:
    return [float_bits(entry.token.logprob) for entry in entries if entry is not None]


def float_bits(value: float) -> int:
    """The 32 bits of a float that holds an fp32 value, as an unsigned integer."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """The value behind `float_bits`."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


@dataclass(frozen=True)
class Difference:
    """Where two outcomes part: `position` counts tokens from the start of the prompt, values are spelled for people.

    `logprob` differs while the tokens up to there agree; `token` differs although the logprobs before it agree;
    `length`: one reply ends and the other goes on.
    """

    what: Literal["logprob", "token", "length", "prompt logprob", "logits", "alternative"]
    position: int
    expected: str
    got: str

    def describe(self) -> str:
        """`logprob at position 17: -1.25 (0xbfa00000), not -1.2500001 (0xbfa00001)`."""
        return f"{self.what} at position {self.position}: expected {self.expected}, got {self.got}"


def first_difference(item: Item, expected: Outcome, got: Outcome) -> Difference | None:
    """The first place where `got` is not `expected`; None when every bit agrees."""
    for i, (a, b) in enumerate(zip(expected.prompt_bits, got.prompt_bits, strict=False)):
        if a != b:
            return Difference("prompt logprob", i + 1, _shown(a), _shown(b))
    start = len(item.prompt)
    for i in range(min(len(expected.token_ids), len(got.token_ids))):
        if expected.token_ids[i] != got.token_ids[i]:
            return Difference("token", start + i, str(expected.token_ids[i]), str(got.token_ids[i]))
        if i < min(len(expected.bits), len(got.bits)) and expected.bits[i] != got.bits[i]:
            return Difference("logprob", start + i, _shown(expected.bits[i]), _shown(got.bits[i]))
    if expected.alternatives and got.alternatives and expected.alternatives != got.alternatives:
        return _alternative(item, expected, got)
    sizes = [(len(o.token_ids), len(o.bits), len(o.prompt_bits), o.finish_reason) for o in (expected, got)]
    if sizes[0] != sizes[1]:
        shown = [f"{tokens} tokens ({reason}), {bits + prompt} logprobs" for tokens, bits, prompt, reason in sizes]
        return Difference("length", start + min(sizes[0][0], sizes[1][0]), *shown)
    return None


def _alternative(item: Item, expected: Outcome, got: Outcome) -> Difference:
    """The first alternative that differs, when tokens and their own logprobs agree."""
    pairs = enumerate(zip(expected.alternatives, got.alternatives, strict=False))
    index, (a, b) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, ((), ())))
    return Difference("alternative", len(item.prompt) + index // (item.params.logprobs or 1), str(a), str(b))


def _shown(bits: int) -> str:
    return f"{bits_float(bits):.9g} (0x{bits:08x})"


def result_digest(outcomes: Iterable[tuple[Item, Outcome]]) -> str:
    """SHA-256 (hex) over names, token ids and logprob bits: equal digests, equal bits, wherever they were computed."""
    digest = hashlib.sha256()
    for item, outcome in sorted(outcomes, key=lambda pair: pair[0].name):
        reply = (item.name, outcome.token_ids, outcome.bits, outcome.prompt_bits, outcome.alternatives)
        digest.update(repr(reply).encode())
    return digest.hexdigest()


SAMPLING: tuple[tuple[str, dict[str, object]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("t=1", {"temperature": 1.0}),
    ("top-k", {"temperature": 0.7, "top_k": 20}),
    ("top-p", {"temperature": 1.0, "top_p": 0.9}),
    ("min-p", {"temperature": 1.4, "min_p": 0.02}),
    ("penalties", {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
    ("filters", {"temperature": 1.1, "top_k": 50, "top_p": 0.95, "min_p": 0.01}),
)
"""How the items of a harness are sampled, in turn."""

_LENGTHS = (5, 17, 1, 33, 64, 16, 65, 100, 15, 129, 31, 200, 63, 128, 2, 257, 127, 48, 255, 90)


def make_items(
    count: int,
    *,
    vocab_size: int,
    longest: int,
    output_tokens: int,
    seed: int = 1,
    kinds: Collection[str] | None = None,
) -> list[Item]:
    """`count` random prompts of ragged lengths, each sampled in one of the ways of `SAMPLING` (or of `kinds` of them).

    No prompt and its output together are longer than `longest`. Equal arguments give equal items on every machine.
    """
    source = random.Random(seed)
    ways = [way for way in SAMPLING if kinds is None or way[0] in kinds]
    items = []
    for index in range(count):
        kind, params = ways[index % len(ways)]
        output = min(output_tokens, longest - 1)
        length = min(_LENGTHS[index % len(_LENGTHS)], longest - output)
        prompt = tuple(source.randrange(vocab_size) for _ in range(length))
        # Every third reports alternatives too, whose ranks and ties must not change either.
        top = 3 if index % 3 == 0 else 0
        items.append(make_item(f"{index}:{kind}", prompt, source.getrandbits(63), output, logprobs=top, **params))
    return items


def make_item(name: str, prompt: Sequence[int], seed: int, output_tokens: int, **params: object) -> Item:
    """An item that generates exactly `output_tokens` tokens and reports the logprob of each."""
    fields: dict[str, object] = {"seed": seed, "max_tokens": output_tokens, "ignore_eos": True, "logprobs": 0}
    return Item(name, tuple(prompt), SamplingParams(**{**fields, "detokenize": False, **params}))  # type: ignore[arg-type]
