"""Turns a schedule into one flat ragged batch and runs the model on it.

Knows pages, positions and the model's forward pass; does not know sampling, text or who waits.

The inputs are written into memory that is allocated once (`inputs`), and a decode step may run as one that was recorded
(`graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.buckets import BUCKET_PAGES, Bucket
from tokenspeed.engine.device import Device
from tokenspeed.engine.graphs import Decode, DecodeGraphs
from tokenspeed.engine.inputs import HostArrays, InputBuffers, Shape, StepInputs
from tokenspeed.engine.kv_cache import KVCache, KVSpecLike, pages_for
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
    `inputs` is where the batch is written; `bucket` the recorded step that it was written for, if any.
    """

    sampled: list[RequestState]
    sampled_rows: list[int]
    prompt_spans: list[tuple[RequestState, int, int, int]]
    complete: list[RequestState]
    inputs: StepInputs = field(init=False)
    bucket: Bucket | None = None

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
    """Owns the input buffers: `token_budget` bounds T, `max_seats` bounds B.

    With `buckets`, decode steps that fit one run as recorded ones (`graphs`).
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        device: Device,
        *,
        token_budget: int,
        max_seats: int,
        buckets: tuple[Bucket, ...] = (),
    ) -> None:
        self.observer: Observer | None = None
        self._model = model
        self._cache = cache
        self._largest = Shape(token_budget, max_seats, cache.page_tables.shape[1], max_seats)
        self._inputs = InputBuffers(device, self._largest, cache.tensors)
        self._count_up = np.arange(token_budget + 1, dtype=np.int64)
        self.graphs = DecodeGraphs(device, self._inputs, buckets) if buckets else None

    def build(self, schedule: Schedule) -> tuple[ForwardBatch, StepRows]:
        """Write the batch: decode rows first, then the prefill chunks. Tensors are views until the next `build`.

        The device has it once `rows.inputs` was uploaded.
        """
        rows, spans = _rows_of(schedule)
        ends = [state.length for state in schedule.decodes] + [stop for _, _, stop in spans]
        host = self._take(schedule, rows, ends)
        host.token_ids[: len(schedule.decodes)] = [state.last_token for state in schedule.decodes]
        end = len(schedule.decodes)
        for sequence, (state, start, stop) in enumerate(spans, len(schedule.decodes)):
            begin, end = end, end + stop - start
            positions = host.positions[begin:end]
            np.add(self._count_up[: stop - start], start, out=positions)
            host.token_ids[begin:end] = state.tokens(start, stop)
            slots = self._cache.page_tables[state.seat][positions // PAGE_SIZE].astype(np.int64)
            host.slots[begin:end] = slots * PAGE_SIZE + positions % PAGE_SIZE
            host.query_starts[sequence + 1] = end
        return self._built(schedule, rows)

    def build_ahead(self, schedule: Schedule, sources: list[int]) -> tuple[ForwardBatch, StepRows]:
        """A decode step of tokens that are being sampled: that of `schedule.decodes[i]` in row `sources[i]` of them.

        Once uploaded, `token_ids` holds these rows; `feed` puts the tokens in their place.
        """
        states = schedule.decodes
        rows = StepRows(list(states), list(range(len(states))), [], [])
        host = self._take(schedule, rows, [state.length + 1 for state in states])
        host.token_ids[: len(states)] = sources
        return self._built(schedule, rows)

    def build_for_nobody(self, tokens: int) -> StepInputs:
        """A step of so many tokens that belong to nobody, uploaded, with as many sequences and logits as may be.

        The largest has the widest page tables there can be, others those of short contexts: kernels may tell the two
        apart.
        """
        most, seats, width, _ = self._largest
        rows = min(tokens, seats)
        inputs = self._inputs.take(Shape(tokens, rows, width if tokens == most else min(width, BUCKET_PAGES[0]), rows))
        inputs.host.pad(0)
        inputs.upload()
        return inputs

    @torch.inference_mode()
    def feed(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Replace the rows in `batch.token_ids` by what was sampled there (`tokens`, int64[R]), on the device.

        A row that has no token (-1) is fed token 0; its request is about to fail, and what comes of it is dropped.
        """
        batch.token_ids.copy_(tokens.index_select(0, batch.token_ids).clamp_min_(0))

    @property
    def model(self) -> Model:
        """What computes."""
        return self._model

    def exchange_model(self, model: Model) -> None:
        """Compute with `model` from now on; it has the shapes of the one before."""
        self._model = model
        if self.graphs is not None:
            self.graphs.forget()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, H]."""
        return self._model.forward(batch)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of these rows of the batch, in the model's dtype."""
        if self.observer is not None:
            self.observer.logits(rows)
        return self._model.compute_logits(hidden[rows])

    def replay(self, rows: StepRows, decode: Decode) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V] and tokens int64[R] of a step that was built for a bucket; valid until the next replay.

        `decode` computes it where the bucket has no recording yet.
        """
        assert self.graphs is not None
        assert rows.bucket is not None
        if self.observer is not None:
            self.observer.logits(rows.inputs.batch.logits_rows[: len(rows.sampled)])
        return self.graphs.replay(rows.bucket, rows.inputs, len(rows.sampled), decode)

    def _take(self, schedule: Schedule, rows: StepRows, ends: list[int]) -> HostArrays:
        """Arrays for the step, in a bucket where it fits one, with all that does not depend on tokens written.

        `ends` are the context lengths. The decode rows are complete but for their token ids.
        """
        count, decodes = len(ends), len(schedule.decodes)
        width = pages_for(max(ends))
        all_decode = not schedule.chunks and len(rows.sampled) == count
        if self.graphs is not None and all_decode and (bucket := self.graphs.find(count, width)):
            rows.bucket, rows.inputs = bucket, self.graphs.inputs(bucket)
            rows.inputs.host.pad(count)
            rows.inputs.host.logits_rows[:] = self._count_up[: bucket.rows]
        else:
            total = decodes + sum(schedule.counts)
            rows.inputs = self._inputs.take(Shape(total, count, width, len(rows.sampled)))
            rows.inputs.host.logits_rows[:] = rows.sampled_rows
        host = rows.inputs.host
        seats = np.array([state.seat for state in schedule.decodes + schedule.chunks], dtype=np.intp)
        host.page_tables[:count] = self._cache.page_tables[seats, : host.page_tables.shape[1]]
        host.context_lens[:count] = ends
        host.query_starts[: decodes + 1] = self._count_up[: decodes + 1]
        positions, slots = host.positions[:decodes], host.slots[:decodes]
        np.subtract(host.context_lens[:decodes], 1, out=positions)
        slots[:] = host.page_tables[self._count_up[:decodes], positions // PAGE_SIZE]
        slots *= PAGE_SIZE
        slots += positions % PAGE_SIZE
        return host

    def _built(self, schedule: Schedule, rows: StepRows) -> tuple[ForwardBatch, StepRows]:
        batch = rows.inputs.batch
        if self.observer is not None:
            self.observer.step(schedule, batch)
        return batch, rows


def _rows_of(schedule: Schedule) -> tuple[StepRows, list[tuple[RequestState, int, int]]]:
    """Where the logits of each request go, and (state, first position, end) of each chunk."""
    rows = StepRows([], [], [], [])
    for row, state in enumerate(schedule.decodes):
        rows.lead(state, row)
    spans = []
    end = len(schedule.decodes)
    for state, count in zip(schedule.chunks, schedule.counts, strict=True):
        begin, end = end, end + count
        start, stop = state.computed, state.computed + count
        spans.append((state, start, stop))
        if stop == state.length:
            rows.lead(state, end - 1)
        if state.wants_prompt_rows and start < state.prompt_length - 1:
            rows.prompt_spans.append((state, begin, start, min(stop, state.prompt_length - 1) - start))
    return rows, spans
