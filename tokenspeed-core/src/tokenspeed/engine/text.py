"""The text of one request as it grows: complete characters only, cut at stop strings."""

from __future__ import annotations

from tokenspeed.detokenize import Detokenizer
from tokenspeed.engine.request import SamplingParams
from tokenspeed.engine.stopping import StopStrings
from tokenspeed.tokenizer import Tokenizer


class TextStream:
    """Turns sampled tokens into the text that may be shown."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer: Detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None

    def push(self, token: int, *, stops_active: bool) -> tuple[str, str | None]:
        """New text after one more token, and the stop string that it completed, if any."""
        piece = self._detokenizer.push(token)
        if self._stops is None:
            return piece, None
        return self._stops.push(piece, active=stops_active)

    def finish(self, *, stops_active: bool) -> tuple[str, str | None]:
        """What was held back, when no further token comes; unfinished characters become U+FFFD."""
        piece = self._detokenizer.finish()
        if self._stops is None:
            return piece, None
        text, stop = self._stops.push(piece, active=stops_active)
        return (text, stop) if stop is not None else (text + self._stops.flush(), None)
