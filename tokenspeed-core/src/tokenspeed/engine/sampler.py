"""The next token of every row: each request's own edits of its logits, then the sampling operator.

Knows logits and sampling parameters; does not know pages, chunks or text. A row's token is a function of its logits,
its parameters, its seed and its position: rows are only ever edited and sampled one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

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

    def sample(self, logits: torch.Tensor, states: list[RequestState]) -> list[int]:
        """Token ids for the rows of `logits` ([R, V], not changed), one for each state; -1 where a row has none."""
        for state in states:
            if self._owner[state.seat] is not state:
                self._take_seat(state)
        edited = [row for row, state in enumerate(states) if state.needs_logits_edit]
        if not edited:
            return self._run(self._operators.sample, logits, states)
        chosen = dict(zip(edited, self._sample_edited(logits, [states[row] for row in edited], edited), strict=True))
        plain = [row for row in range(len(states)) if row not in chosen]
        if plain:
            ids = self._run(self._operators.sample, logits[plain], [states[row] for row in plain])
            chosen.update(zip(plain, ids, strict=True))
        return [chosen[row] for row in range(len(states))]

    def temperatures(self, states: list[RequestState]) -> torch.Tensor:
        """float32[R]: what a reported log-probability is scaled by."""
        values = np.array([state.request.params.temperature for state in states], dtype=np.float32)
        return torch.from_numpy(values).to(self._device)

    def _sample_edited(self, logits: torch.Tensor, states: list[RequestState], rows: list[int]) -> list[int]:
        copy = logits[rows].to(torch.float32)
        for row, state in zip(copy, states, strict=True):
            edit = self._edits[state.seat]
            assert edit is not None
            edit.apply(row, state.generated)
        return self._run(self._operators.sample_edited, copy, states)

    def _run(self, sample: Callable[..., torch.Tensor], logits: torch.Tensor, states: list[RequestState]) -> list[int]:
        seats = np.array([state.seat for state in states], dtype=np.intp)
        positions = np.array([state.length for state in states], dtype=np.int64)
        ids = sample(
            logits,
            self._tensor(self._temperature[seats]),
            self._tensor(self._top_k[seats]),
            self._tensor(self._top_p[seats]),
            self._tensor(self._min_p[seats]),
            self._tensor(self._seed[seats]),
            self._tensor(positions),
        )
        tokens: list[int] = ids.tolist()
        return tokens

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

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
