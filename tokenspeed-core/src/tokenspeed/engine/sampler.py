"""The next token of every row: each request's own edits of its logits, then the sampling operator.

Knows logits and sampling parameters; does not know pages, chunks or text. A row's token is a function of its logits,
its parameters, its seed and its position: rows are only ever edited and sampled one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.engine.inputs import HostArrays, SamplingColumns
from tokenspeed.engine.penalties import LogitsEdit
from tokenspeed.engine.state import RequestState
from tokenspeed.layers.context import LayerContext, Operation


@dataclass(frozen=True)
class SamplingOperators:
    """The operators that the engine itself calls, and the order in which log-probabilities are added up.

    `sample_edited` is `sampling.sample` on fp32 logits, for rows that a request's penalties or masks have changed.
    `order` and `block` are what `sampling.logprobs` takes: `torch` or `megatron`, and the block width of the latter.
    """

    sample: Callable[..., torch.Tensor]
    sample_edited: Callable[..., torch.Tensor]
    logprobs: Callable[..., torch.Tensor]
    order: str = "torch"
    block: int = 32768

    @classmethod
    def ask(cls, ctx: LayerContext, logits_dtype: torch.dtype, *, order: str, block: int) -> SamplingOperators:
        """Record the engine's own needs beside the model's; they run once the plan has bound `ctx.operations`."""
        sample: Operation = ctx.operator("sampling.sample", dtypes={"logits": logits_dtype})
        edited: Operation = ctx.operator("sampling.sample", dtypes={"logits": torch.float32})
        logprobs: Operation = ctx.operator("sampling.logprobs", dtypes={"logits": logits_dtype})
        return cls(sample, edited, logprobs, order, block)


class Sampler:
    """Sampling parameters of every seat in arrays, written once when a request is seated."""

    def __init__(
        self,
        operators: SamplingOperators,
        *,
        max_seats: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._operators = operators
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._temperature = np.zeros(max_seats, dtype=np.float32)
        self._top_k = np.zeros(max_seats, dtype=np.int32)
        self._top_p = np.ones(max_seats, dtype=np.float32)
        self._min_p = np.zeros(max_seats, dtype=np.float32)
        self._seed = np.zeros(max_seats, dtype=np.int64)
        self._edits: list[LogitsEdit | None] = [None] * max_seats
        self._owner: list[RequestState | None] = [None] * max_seats

    def fill(self, states: list[RequestState], host: HostArrays, ahead: int = 0) -> None:
        """Write the columns of `states` into the first rows.

        `ahead` tokens of each state are sampled and not known yet.
        """
        for state in states:
            if self._owner[state.seat] is not state:
                self._take_seat(state)
        count = len(states)
        seats = np.array([state.seat for state in states], dtype=np.intp)
        host.temperature[:count] = self._temperature[seats]
        host.top_k[:count] = self._top_k[seats]
        host.top_p[:count] = self._top_p[seats]
        host.min_p[:count] = self._min_p[seats]
        host.seeds[:count] = self._seed[seats]
        host.sampled_positions[:count] = [state.length + ahead for state in states]

    def sample(
        self,
        logits: torch.Tensor,
        states: list[RequestState],
        columns: SamplingColumns,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids int64[R] for the rows of `logits` ([R, V], not changed), one a state; -1 where a row has none.

        `drawn` are tokens that were sampled already, without what requests change in their logits. Waits for nothing.
        """
        edited = [row for row, state in enumerate(states) if state.needs_logits_edit]
        if not edited:
            return self._operators.sample(logits, *columns) if drawn is None else drawn
        tokens = torch.empty(len(states), dtype=torch.int64, device=self._device) if drawn is None else drawn.clone()
        plain = [row for row, state in enumerate(states) if not state.needs_logits_edit]
        if plain and drawn is None:
            rows = torch.tensor(plain, device=self._device)
            tokens[rows] = self._operators.sample(logits[rows], *(column[rows] for column in columns))
        rows = torch.tensor(edited, device=self._device)
        copy = logits[rows].to(torch.float32)
        for row, state in zip(copy, [states[row] for row in edited], strict=True):
            edit = self._edits[state.seat]
            assert edit is not None
            edit.apply(row, state.generated)
        tokens[rows] = self._operators.sample_edited(copy, *(column[rows] for column in columns))
        return tokens

    def temperatures(self, states: list[RequestState]) -> torch.Tensor:
        """float32[R]: what a reported log-probability is scaled by."""
        values = np.array([state.request.params.temperature for state in states], dtype=np.float32)
        return torch.from_numpy(values).to(self._device)

    def _take_seat(self, state: RequestState) -> None:
        """Write a newly seated request's parameters into its seat."""
        params, seat = state.request.params, state.seat
        self._owner[seat] = state
        self._temperature[seat] = params.temperature
        self._top_k[seat] = max(params.top_k, 0)
        self._top_p[seat] = params.top_p
        self._min_p[seat] = params.min_p
        self._seed[seat] = state.request.seed
        self._edits[seat] = None
        if state.needs_logits_edit:
            self._edits[seat] = LogitsEdit(
                vocab_size=self._vocab_size,
                device=self._device,
                allowed=params.allowed_token_ids,
                bias=params.logit_bias,
                masked_until=params.min_tokens,
                masked=sorted(state.stop_rules.token_ids),
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
                counts=state.counts,
            )
