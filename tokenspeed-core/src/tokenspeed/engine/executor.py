"""Computes steps: a schedule in, a `Flight` out.

Knows the model, sampling and what the host reads back; does not know who waits, when a request ends, or its text. Of a
request it changes nothing but the prompt logprobs, which are read here because there is no memory for all their rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.device import Device
from tokenspeed.engine.flight import Flight, Reading
from tokenspeed.engine.inputs import StepInputs
from tokenspeed.engine.kv_cache import KVCache
from tokenspeed.engine.logprobs import PROMPT_ROWS_AT_ONCE, Logprobs
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import PositionLogprobs
from tokenspeed.engine.runner import Model, Observer, Runner, StepRows
from tokenspeed.engine.sampler import Sampler, SamplingOperators
from tokenspeed.engine.scheduler import Schedule
from tokenspeed.engine.state import RequestState


class Executor:
    """Issues steps to one device and waits for them.

    `operator_seconds` is the time spent in operators and in waiting for them. `steps_ahead` counts the steps that were
    issued before the tokens of the one in front of them were read.
    """

    def __init__(
        self, model: Model, operators: SamplingOperators, cache: KVCache, device: Device, options: EngineOptions
    ) -> None:
        self.operator_seconds = 0.0
        self.steps_ahead = 0
        self._device = device
        self._ahead = options.ahead
        # The largest first: smaller ones find room in its memory.
        most = options.max_num_batched_tokens
        self._rehearsals = [most, *sorted((size for size in options.warm_up_tokens if size < most), reverse=True)]
        self._operators = operators
        self._runner = Runner(
            model,
            cache,
            device,
            token_budget=options.max_num_batched_tokens,
            max_seats=options.max_num_seqs,
            buckets=options.decode_buckets,
        )
        self._sampler = Sampler(
            operators, max_seats=options.max_num_seqs, vocab_size=model.vocab_size, device=options.device
        )
        self._logprobs = Logprobs(operators, raw=options.raw_logprobs)

    @property
    def model(self) -> Model:
        """What computes from now on."""
        return self._runner.model

    @property
    def replays(self) -> int:
        """Decode steps that ran as recorded ones."""
        return 0 if self._runner.graphs is None else self._runner.graphs.replays

    def exchange_model(self, model: Model) -> None:
        """Compute with `model` from now on; it has the shapes of the one before."""
        self._runner.exchange_model(model)

    def observe(self, observer: Observer | None) -> None:
        """Tell `observer` of every step from now on, or nobody."""
        self._runner.observer = observer

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Record every bucket, then compute a step of each size that matters; yields how much is done, and of how much.

        In this order, so that the largest step meets the memory that is left beside the recordings.
        """
        graphs, sizes = self._runner.graphs, self._rehearsals if self._device.asynchronous else []
        recorded = 0 if graphs is None else len(graphs.buckets)
        if graphs is not None:
            yield from ((done, recorded + len(sizes)) for done in graphs.record_all(self._decode))
        for done, tokens in enumerate(sizes, recorded + 1):
            self._rehearse(self._runner.build_for_nobody(tokens))
            yield done, recorded + len(sizes)

    def launch(self, schedule: Schedule) -> Flight:
        """Issue a step. What a device out of memory could not compute is in the flight's `shed`."""
        batch, rows = self._runner.build(schedule)
        self._sampler.fill(rows.sampled, rows.inputs.host)
        rows.inputs.upload()
        computing = time.perf_counter()
        flight, error = self._try(schedule, batch, rows)
        if flight is None:
            flight = Flight(schedule, rows, shed=f"{error}; {self._device.reclaim()}")
        self.operator_seconds += time.perf_counter() - computing
        return flight

    def launch_ahead(self, schedule: Schedule, flight: Flight) -> Flight | None:
        """Issue the decode step that follows `flight`, whose tokens nobody has read; None where there is no memory."""
        assert flight.reading is not None
        batch, rows = self._runner.build_ahead(schedule, flight.rows_of(schedule.decodes))
        self._sampler.fill(rows.sampled, rows.inputs.host, ahead=1)
        rows.inputs.upload()
        computing = time.perf_counter()
        ahead, _ = self._try(schedule, batch, rows, feeding=flight.reading.tokens)
        if ahead is None:
            # The same step comes again when `flight` was read, and fails its requests if it must.
            self._device.reclaim()
        else:
            self.steps_ahead += 1
        self.operator_seconds += time.perf_counter() - computing
        return ahead

    def wait(self, flight: Flight) -> None:
        """Wait until the host has the tokens and logprobs of a step."""
        waiting = time.perf_counter()
        flight.read()
        self.operator_seconds += time.perf_counter() - waiting

    def _try(
        self, schedule: Schedule, batch: ForwardBatch, rows: StepRows, feeding: torch.Tensor | None = None
    ) -> tuple[Flight | None, str]:
        """Compute a step, of the tokens `feeding` if there are any; None and the reason where memory ran out.

        The error itself ends here: its traceback holds what the step had allocated, which is to be free afterwards.
        """
        try:
            if feeding is not None:
                self._runner.feed(batch, feeding)
            return self._compute(schedule, batch, rows), ""
        except torch.OutOfMemoryError as error:
            return None, str(error)

    @torch.inference_mode()
    def _compute(self, schedule: Schedule, batch: ForwardBatch, rows: StepRows) -> Flight:
        flight = Flight(schedule, rows)
        if rows.bucket is not None:
            logits, drawn = self._runner.replay(rows, self._decode)
        else:
            hidden = self._runner.forward(batch)
            flight.poisoned = [span[0] for span in rows.prompt_spans if not self._read_prompt_span(hidden, *span)]
            if not rows.sampled:
                return flight
            logits, drawn = self._runner.logits(hidden, batch.logits_rows), None
        columns = rows.inputs.columns
        tokens = self._sampler.sample(logits, rows.sampled, columns, drawn)
        if self._ahead and flight.is_simple:
            flight.reading = self._start_reading(logits, tokens, rows)
        else:
            flight.tokens = self._device.read(tokens)()[0].tolist()
            flight.logprobs = self._output_logprobs(logits, rows.sampled, flight.tokens)
        return flight

    def _decode(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step, for recording: logits and tokens of every row, one for each sequence."""
        logits = self._runner.model.compute_logits(self._runner.forward(inputs.batch))
        return logits, self._operators.sample(logits, *inputs.columns)

    @torch.inference_mode()
    def _rehearse(self, inputs: StepInputs) -> None:
        """Call every operator that a step may call: with logits as they are, changed by requests, and of prompts."""
        hidden = self._runner.forward(inputs.batch)
        self._runner.model.compute_logits(hidden[:PROMPT_ROWS_AT_ONCE])
        logits = self._runner.model.compute_logits(hidden[inputs.batch.logits_rows])
        tokens = self._operators.sample(logits, *inputs.columns)
        self._operators.sample_edited(logits.to(torch.float32), *inputs.columns)
        self._device.read(tokens, *self._logprobs.start(logits, tokens, inputs.columns.temperature))()

    def _start_reading(self, logits: torch.Tensor, tokens: torch.Tensor, rows: StepRows) -> Reading:
        """Start copying tokens to the host, and the logprobs of all of them if somebody asks for one."""
        if all(state.request.params.logprobs is None for state in rows.sampled):
            return Reading(tokens, self._device.read(tokens))
        temperature = rows.inputs.columns.temperature[: len(rows.sampled)]
        return Reading(tokens, self._device.read(tokens, *self._logprobs.start(logits, tokens, temperature)))

    def _read_prompt_span(self, hidden: torch.Tensor, state: RequestState, row: int, position: int, count: int) -> bool:
        """Logprobs of the prompt tokens that follow `count` rows; False when one is NaN. Memory: a few rows at once."""
        params, entries = state.request.params, state.prompt_logprobs
        assert entries is not None
        assert params.prompt_logprobs is not None
        # After a preemption the rows come again; what was read before is kept.
        skip = len(entries) - 1 - position
        for first in range(row + max(skip, 0), row + count, PROMPT_ROWS_AT_ONCE):
            last = min(first + PROMPT_ROWS_AT_ONCE, row + count)
            following = position + first - row + 1
            size = last - first
            entries += self._logprobs.of(
                self._runner.logits(hidden, torch.arange(first, last, device=hidden.device)),
                state.tokens(following, following + size).tolist(),
                [params.prompt_logprobs] * size,
                [()] * size,
                self._sampler.temperatures([state] * size),
            )
        return not any(entry is not None and math.isnan(entry.token.logprob) for entry in entries[position + 1 :])

    def _output_logprobs(
        self, logits: torch.Tensor, states: list[RequestState], tokens: list[int]
    ) -> dict[int, PositionLogprobs]:
        """Logprobs by row, for the rows that ask for them and have a token."""
        asked = [
            row for row, state in enumerate(states) if state.request.params.logprobs is not None and tokens[row] >= 0
        ]
        if not asked:
            return {}
        chosen = [states[row] for row in asked]
        entries = self._logprobs.of(
            logits if len(asked) == len(states) else logits[asked],
            [tokens[row] for row in asked],
            [state.request.params.logprobs or 0 for state in chosen],
            [state.request.params.logprob_token_ids or () for state in chosen],
            self._sampler.temperatures(chosen),
        )
        return dict(zip(asked, entries, strict=True))
