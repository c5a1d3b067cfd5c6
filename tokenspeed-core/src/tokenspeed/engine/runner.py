"""Turns a schedule into one flat ragged batch and runs the model on it.

Knows pages, positions and the model's forward pass; does not know sampling, text or who waits.

The inputs are written into arrays that are allocated once, so a step creates a handful of tensor views and nothing for
each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.kv_cache import KVCache, KVSpecLike
from tokenspeed.engine.scheduler import Schedule
from tokenspeed.engine.state import RequestState
from tokenspeed.kernels.operators import PAGE_SIZE


class Model(Protocol):
    """What the engine asks of a model (`tokenspeed.models.base.CausalLM`)."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, H] after the final norm; writes the batch's KV."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden states [R, H], in the model's dtype."""
        ...

    def kv_specs(self) -> Sequence[KVSpecLike]:
        """What each layer keeps in the cache."""
        ...


@dataclass
class StepRows:
    """Which rows of the batch lead where. Rows are indices into the flat batch.

    `sampled[i]` gets its next token from the logits of row `sampled_rows[i]`. `prompt_spans` lists, for each request
    that wants prompt logprobs, its first row, the prompt position of that row and how many rows of its prompt follow.
    `complete` are the requests that are computed to their end and sample nothing (`max_tokens` 0).
    """

    sampled: list[RequestState]
    sampled_rows: list[int]
    prompt_spans: list[tuple[RequestState, int, int, int]]
    complete: list[RequestState]

    def lead(self, state: RequestState, row: int) -> None:
        """The last token of `state` stands in `row`."""
        if state.length < state.max_total:
            self.sampled.append(state)
            self.sampled_rows.append(row)
        else:
            self.complete.append(state)


class Observer(Protocol):
    """A harness that watches an engine. It must change nothing."""

    def step(self, schedule: Schedule, batch: ForwardBatch) -> None:
        """A forward pass over `batch` follows: one row for each decode, then the rows of each chunk."""

    def logits(self, rows: torch.Tensor) -> None:
        """Logits of these rows (int64[R]) of the batch follow, and perhaps their logprobs and tokens."""


class Runner:
    """Owns the input buffers. `token_budget` bounds T, `max_seats` bounds B."""

    def __init__(
        self, model: Model, cache: KVCache, *, token_budget: int, max_seats: int, device: torch.device | str = "cpu"
    ) -> None:
        self.observer: Observer | None = None
        self._model = model
        self._cache = cache
        self._device = torch.device(device)
        self._token_ids = np.zeros(token_budget, dtype=np.int64)
        self._positions = np.zeros(token_budget, dtype=np.int64)
        self._slots = np.zeros(token_budget, dtype=np.int64)
        self._query_starts = np.zeros(max_seats + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_seats, dtype=np.int32)
        self._count_up = np.arange(token_budget, dtype=np.int64)

    def build(self, schedule: Schedule) -> tuple[ForwardBatch, StepRows]:
        """Fill the batch: decode rows first, then the prefill chunks. Tensors are views until the next `build`."""
        decodes, chunks = schedule.decodes, schedule.chunks
        seats = np.array([state.seat for state in decodes + chunks], dtype=np.intp)
        rows = self._fill_decodes(decodes, seats[: len(decodes)])
        total = self._fill_chunks(schedule, rows)
        sequences = len(seats)
        width = int(-(-self._context_lens[:sequences].max() // PAGE_SIZE))
        batch = ForwardBatch(
            token_ids=self._tensor(self._token_ids[:total]),
            positions=self._tensor(self._positions[:total]),
            slots=self._tensor(self._slots[:total]),
            query_starts=self._tensor(self._query_starts[: sequences + 1]),
            context_lens=self._tensor(self._context_lens[:sequences]),
            page_tables=self._tensor(self._cache.page_tables[seats, :width]),
            logits_rows=self._tensor(np.array(rows.sampled_rows, dtype=np.int64)),
            kv_caches=self._cache.tensors,
        )
        if self.observer is not None:
            self.observer.step(schedule, batch)
        return batch, rows

    @property
    def model(self) -> Model:
        """What computes."""
        return self._model

    def exchange_model(self, model: Model) -> None:
        """Compute with `model` from now on; it has the shapes of the one before."""
        self._model = model

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, H]."""
        return self._model.forward(batch)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of these rows of the batch, in the model's dtype."""
        if self.observer is not None:
            self.observer.logits(rows)
        return self._model.compute_logits(hidden[rows])

    def _fill_decodes(self, decodes: list[RequestState], seats: np.ndarray) -> StepRows:
        count = len(decodes)
        if count:
            positions = self._positions[:count]
            positions[:] = [state.computed for state in decodes]
            self._token_ids[:count] = [state.last_token for state in decodes]
            self._slots[:count] = self._cache.page_tables[seats, positions // PAGE_SIZE]
            self._slots[:count] *= PAGE_SIZE
            self._slots[:count] += positions % PAGE_SIZE
            self._query_starts[: count + 1] = self._count_up[: count + 1]
            self._context_lens[:count] = positions
            self._context_lens[:count] += 1
        rows = StepRows([], [], [], [])
        for row, state in enumerate(decodes):
            rows.lead(state, row)
        return rows

    def _fill_chunks(self, schedule: Schedule, rows: StepRows) -> int:
        """Write the chunks behind the decode rows, note where their logits go, and return T."""
        sequence = end = len(schedule.decodes)
        self._query_starts[0] = 0
        for state, count in zip(schedule.chunks, schedule.counts, strict=True):
            begin, start = end, state.computed
            stop = start + count
            end = begin + count
            positions = self._positions[begin:end]
            np.add(self._count_up[:count], start, out=positions)
            self._token_ids[begin:end] = state.tokens(start, stop)
            slots = self._cache.page_tables[state.seat][positions // PAGE_SIZE].astype(np.int64)
            self._slots[begin:end] = slots * PAGE_SIZE + positions % PAGE_SIZE
            self._query_starts[sequence + 1] = end
            self._context_lens[sequence] = stop
            sequence += 1
            if stop == state.length:
                rows.lead(state, end - 1)
            if state.wants_prompt_rows and start < state.prompt_length - 1:
                rows.prompt_spans.append((state, begin, start, min(stop, state.prompt_length - 1) - start))
        return end

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
