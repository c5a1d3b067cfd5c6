"""When a request ends: a token that stops it, a stop string in its text, or no room for more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenspeed.engine.request import SamplingParams


@dataclass(frozen=True)
class StopRules:
    """Tokens that end a request: `eos` (reported without a reason) and `stop_ids` (reported by id)."""

    eos: frozenset[int]
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Collection[int]) -> StopRules:
        """A model's end-of-sequence ids unless ignored, and the request's own stop ids."""
        return cls(frozenset() if params.ignore_eos else frozenset(eos_ids), frozenset(params.stop_token_ids))

    @property
    def token_ids(self) -> frozenset[int]:
        """Every token that ends the request; these are masked until `min_tokens` are out."""
        return self.eos | self.stop_ids


class StopStrings:
    """Cuts a growing text at the first stop string, and holds back what may yet become one.

    The first stop string is the one that *ends* first; of several that end together, the longest. That is a property of
    the text, so it does not matter how the text is split into pieces.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, *, active: bool = True) -> tuple[str, str | None]:
        """Add text; return what may be shown now and the stop string that was met, after which nothing more comes.

        A stop string counts only when it ends inside `piece` and the rules are `active` (`min_tokens` are out).
        """
        text = self._held + piece
        if active and piece and (hit := self._first(text, len(self._held))):
            end, stop = hit
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text that was held back, when the request ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """(end, stop) of the stop string that ends first after `old` characters, the longest of several."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                    best = end, stop
        return best

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
