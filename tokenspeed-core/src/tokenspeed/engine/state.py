"""One request inside the engine: its tokens, what of them is computed, and what it holds.

The scheduler and the engine own these; nothing outside the engine sees them.
"""

from __future__ import annotations

import numpy as np

from tokenspeed.engine.penalties import TokenCounts
from tokenspeed.engine.prefix_cache import ChainKey
from tokenspeed.engine.request import PositionLogprobs, Request
from tokenspeed.engine.stopping import StopRules
from tokenspeed.engine.text import TextStream

_GROWTH = 64


class RequestState:
    """A request on its way.

    `tokens` is the prompt and every token sampled so far; positions `0 .. computed-1` have their KV in `pages`. A state
    is *seated* (`seat >= 0`) while it runs; waiting and preempted ones have no seat and no page. `max_total` is the
    length at which the request ends for want of room or because `max_tokens` are out. `fingerprints` are those of the
    engine when tokens were sampled, each once.
    """

    __slots__ = (
        "_tokens",
        "cached_tokens",
        "chain",
        "computed",
        "counts",
        "fingerprints",
        "first_update",
        "length",
        "max_total",
        "needs_logits_edit",
        "pages",
        "preemptions",
        "prompt_length",
        "prompt_logprobs",
        "request",
        "seat",
        "stop_rules",
        "text",
    )

    def __init__(
        self,
        request: Request,
        max_total: int,
        stop_rules: StopRules,
        text: TextStream | None,
        counts: TokenCounts | None,
    ) -> None:
        self.request = request
        self.prompt_length = self.length = len(request.prompt)
        self._tokens = np.empty(self.length + _GROWTH, dtype=np.int64)
        self._tokens[: self.length] = request.prompt
        self.max_total = max_total
        self.stop_rules = stop_rules
        self.text = text
        self.counts = counts
        params = request.params
        self.needs_logits_edit = bool(
            counts is not None
            or params.logit_bias
            or params.allowed_token_ids is not None
            or (params.min_tokens and stop_rules.token_ids)
        )
        self.computed = 0
        self.seat = -1
        self.pages: list[int] = []
        self.chain: list[ChainKey] = []
        self.cached_tokens = 0
        self.preemptions = 0
        self.fingerprints: list[str] = []
        self.first_update = True
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that must still pass through the model before the next one can be sampled."""
        return self.length - self.computed

    @property
    def wants_prompt_rows(self) -> bool:
        """Logits of prompt positions are still wanted, so the prompt's KV must not come from the prefix cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A view of the tokens, int64."""
        return self._tokens[start : self.length if stop is None else stop]

    @property
    def last_token(self) -> int:
        """The newest token."""
        return int(self._tokens[self.length - 1])

    def forget_weights(self) -> None:
        """The weights are new: page keys and prompt logprobs of the old ones that nobody has seen yet are void."""
        self.chain = []
        if self.first_update and self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def append(self, token: int) -> None:
        """Add a sampled token."""
        if self.length == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(self.length, dtype=np.int64)))
        self._tokens[self.length] = token
        self.length += 1
        if self.counts is not None:
            self.counts.add(token)
