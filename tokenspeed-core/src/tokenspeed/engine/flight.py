"""A step on its way: issued to the device, perhaps not read back yet.

While a step is in flight the requests stand where the last landed step left them; a flight that is dropped has changed
nothing, since its tokens are a function of what the requests hold and come out the same when it is issued again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenspeed.engine.request import PositionLogprobs, TokenLogprob
from tokenspeed.engine.runner import StepRows
from tokenspeed.engine.scheduler import Schedule
from tokenspeed.engine.state import RequestState


@dataclass
class Reading:
    """Tokens int64[R] on the device, and the function that waits for their copy (and that of values and ranks)."""

    tokens: torch.Tensor
    wait: Callable[[], list[torch.Tensor]]


@dataclass
class Flight:
    """One step. `tokens` (one for each of `rows.sampled`, -1: none) and `logprobs` (by row) are there once `read`.

    `poisoned` are requests whose prompt gave NaN. `shed` says why the device computed nothing of the step.
    """

    schedule: Schedule
    rows: StepRows
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    poisoned: list[RequestState] = field(default_factory=list)
    reading: Reading | None = None
    shed: str = ""

    @property
    def is_simple(self) -> bool:
        """Nobody needs more than tokens and their own logprobs, so that the host has nothing to do in between."""
        return not self.rows.prompt_spans and all(
            not state.needs_logits_edit
            and not state.request.params.logprobs
            and not state.request.params.logprob_token_ids
            for state in self.rows.sampled
        )

    def live(self) -> list[RequestState]:
        """The sampled requests that have not ended since."""
        return [state for state in self.rows.sampled if state.seat >= 0]

    def rows_of(self, states: list[RequestState]) -> list[int]:
        """Rows of some of the sampled requests."""
        rows = {id(state): row for row, state in enumerate(self.rows.sampled)}
        return [rows[id(state)] for state in states]

    def read(self) -> None:
        """Wait for what is still being copied."""
        if self.reading is None:
            return
        tokens, *scores = (part.tolist() for part in self.reading.wait())
        self.tokens = tokens
        if scores:
            for row, (state, token, value, rank) in enumerate(zip(self.rows.sampled, tokens, *scores, strict=True)):
                if token >= 0 and state.request.params.logprobs is not None:
                    self.logprobs[row] = PositionLogprobs(TokenLogprob(token, value, rank))
        self.reading = None
