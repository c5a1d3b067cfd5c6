"""The engine: samples in, tokens out, one `step` at a time.

`Engine.step` tells the story; the nouns that it uses each have a file: `scheduler`, `kv_cache`, `prefix_cache`,
`runner`, `sampler`, `logprobs`, `flight`, `text`. Not thread-safe: one thread owns an engine.

What is computed for a sample is a function of its tokens, parameters and seed. Chunking, caching, preemption and
neighbours decide only *when* something is computed; a token that was sampled once is never sampled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.device import Device, open_device
from tokenspeed.engine.flight import Flight, Reading
from tokenspeed.engine.inputs import StepInputs
from tokenspeed.engine.kv_cache import KVCache, pages_for
from tokenspeed.engine.logprobs import PROMPT_ROWS_AT_ONCE, Logprobs
from tokenspeed.engine.penalties import TokenCounts
from tokenspeed.engine.request import FinishReason, PositionLogprobs, Request, TokenUpdate
from tokenspeed.engine.runner import Model, Observer, Runner, StepRows
from tokenspeed.engine.sampler import Sampler, SamplingOperators
from tokenspeed.engine.scheduler import Schedule, Scheduler
from tokenspeed.engine.state import RequestState
from tokenspeed.engine.stopping import StopRules
from tokenspeed.engine.text import TextStream
from tokenspeed.engine.validation import Limits, validate
from tokenspeed.errors import CheckpointError, RequestError
from tokenspeed.loading.update import NamedTensors, StagedWeights, WeightStaging
from tokenspeed.numerics.certificate import Certificate
from tokenspeed.numerics.weights import WeightsDigest
from tokenspeed.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and modes of one engine, all decided.

    `num_pages` of 16 tokens must hold `max_model_len` tokens; `max_num_batched_tokens` must reach `max_num_seqs`.
    `max_chunk_tokens` bounds a prefill chunk (None: the budget alone). `eos_ids` end a request unless it ignores them.
    Decode steps that fit one of `decode_buckets` are recorded. With `ahead`, a decode step may be issued before the
    tokens of the one in front of it were read back; neither changes a bit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    max_chunk_tokens: int | None = None
    prefix_caching: bool = True
    raw_logprobs: bool = False
    max_logprobs: int = 20
    weight_version: str = ""
    eos_ids: tuple[int, ...] = ()
    device: str = "cpu"
    decode_buckets: tuple[Bucket, ...] = ()
    ahead: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters since the start. `pages_idle` are cached and unused; `*_seconds` add up over all steps."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    pages_idle: int
    pages_free: int
    cached_tokens: int
    preemptions: int
    chunked_prefills: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    finished_requests: int
    step_seconds: float
    operator_seconds: float


class Engine:
    """Runs one model. `operators` are bound by the same plan as the model's own.

    `certificate` says what determines the bits of what this engine computes; it is replaced when the weights are.
    `staging` reads new weights; without it they cannot be exchanged. `device` is opened by its name in the options.
    `steps_ahead` counts the steps that were issued before the tokens of the one in front of them were read.
    """

    def __init__(
        self,
        model: Model,
        operators: SamplingOperators,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        certificate: Certificate | None = None,
        staging: WeightStaging | None = None,
        device: Device | None = None,
    ) -> None:
        if options.num_pages < pages_for(options.max_model_len):
            raise ValueError(
                f"{options.num_pages} pages of 16 tokens cannot hold one request of {options.max_model_len} tokens"
            )
        self.options = options
        self.limits = Limits(
            vocab_size=model.vocab_size, max_model_len=options.max_model_len, max_logprobs=options.max_logprobs
        )
        self.tokenizer = tokenizer
        self.certificate = certificate
        self._fingerprint = self.fingerprint
        self._staging = staging
        self._weight_version = options.weight_version
        self._device = device or open_device(options.device)
        self._cache = KVCache(
            model.kv_specs(),
            options.num_pages,
            max_seats=options.max_num_seqs,
            max_pages_per_seat=pages_for(options.max_model_len),
            device=options.device,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_seats=options.max_num_seqs,
            token_budget=options.max_num_batched_tokens,
            max_chunk=options.max_chunk_tokens,
            prefix_caching=options.prefix_caching,
            weight_version=options.weight_version,
        )
        self._runner = Runner(
            model,
            self._cache,
            self._device,
            token_budget=options.max_num_batched_tokens,
            max_seats=options.max_num_seqs,
            buckets=options.decode_buckets,
            decode=self._decode,
        )
        self._sampler = Sampler(
            operators, max_seats=options.max_num_seqs, vocab_size=model.vocab_size, device=options.device
        )
        self._operators = operators
        self._logprobs = Logprobs(operators, raw=options.raw_logprobs)
        self._flight: Flight | None = None
        self.steps_ahead = 0
        self._steps = self._prompt_tokens = self._generated_tokens = self._finished = 0
        self._step_seconds = self._operator_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Some request waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def fingerprint(self) -> str:
        """What determines the bits, in short; empty for an engine without a certificate."""
        return "" if self.certificate is None else self.certificate.fingerprint

    @property
    def model(self) -> Model:
        """The model that computes; another object once new weights were installed."""
        return self._runner.model

    @property
    def weight_version(self) -> str:
        """Names the weights that compute from now on; stamped on every update."""
        return self._weight_version

    def add(self, request: Request, *, is_checked: bool = False) -> None:
        """Queue one sample. Raises RequestError (and keeps nothing) when it can never run.

        `is_checked` for a further sample of a request of which another one was accepted.
        """
        if not is_checked:
            validate(request, self.limits)
        if self._scheduler.find(request.id) is not None:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id", code="duplicate_request_id")
        params = request.params
        most = self.limits.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(request.prompt) + params.max_tokens)
        text = TextStream(self.tokenizer, params) if self.tokenizer is not None and params.detokenize else None
        penalised = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        counts = TokenCounts(request.prompt) if penalised else None
        rules = StopRules.of(params, self.options.eos_ids)
        self._scheduler.add(RequestState(request, most, rules, text, counts))

    def abort(self, request_id: str) -> TokenUpdate | None:
        """Free everything that a sample holds, now. Its last update, or None when no such sample waits or runs."""
        state = self._scheduler.find(request_id)
        return None if state is None else self._finish(state, "abort")

    def step(self) -> list[TokenUpdate]:
        """One forward pass over what the scheduler chose, and what it added to each request."""
        if not self.has_work:
            return []
        started = time.perf_counter()
        flight = self._flight if self._flight and self._flight.live() else self._launch(self._scheduler.schedule())
        self._flight = self._launch_ahead(flight)
        updates = self._land(flight)
        self._steps += 1
        self._step_seconds += time.perf_counter() - started
        return updates

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Compute the largest step once, and record the decode steps of every bucket, before the first request.

        Yields how much is done, and of how much. The first shows at once that the memory is enough, and compiles what a
        GPU's kernels compile. Without it a bucket is recorded when it is first needed. A CPU has nothing to warm up.
        """
        graphs = self._runner.graphs
        total = int(self._device.asynchronous) + (0 if graphs is None else len(graphs.buckets))
        if self._device.asynchronous:
            self._rehearse(self._runner.build_largest())
            yield 1, total
        if graphs is not None:
            yield from ((done + int(self._device.asynchronous), total) for done in graphs.record_all())

    @property
    def replays(self) -> int:
        """Decode steps that ran as recorded ones."""
        return 0 if self._runner.graphs is None else self._runner.graphs.replays

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=cache.num_pages,
            pages_used=cache.used,
            pages_idle=cache.idle,
            pages_free=cache.available - cache.idle,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.preemptions,
            chunked_prefills=scheduler.chunked_prefills,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished_requests=self._finished,
            step_seconds=self._step_seconds,
            operator_seconds=self._operator_seconds,
        )

    def observe(self, observer: Observer | None) -> None:
        """Tell `observer` of every step from now on, or nobody."""
        self._runner.observer = observer

    def kv_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The memory of the KV cache, keys and values of each layer; for harnesses."""
        return self._cache.tensors

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; pages in use stay with their requests and are not shared any more."""
        self._scheduler.forget_prefixes()
        return True

    def abort_all(self) -> list[TokenUpdate]:
        """Abort everything that waits or runs; their last updates."""
        states = [*self._scheduler.running.values(), *self._scheduler.waiting.values()]
        return [self._finish(state, "abort") for state in states]

    def preempt(self, request_ids: Collection[str]) -> int:
        """Send running requests back to the queue to be recomputed; how many were running. Changes no output."""
        self._flight = None
        return self._scheduler.preempt(request_ids)

    def stage_weights(self, source: str | Path | NamedTensors) -> StagedWeights:
        """Read, check and pack new weights: a folder, or (name, tensor) pairs. The engine goes on with the old ones.

        Raises CheckpointError, with every tensor that is wrong.
        """
        if self._staging is None:
            raise CheckpointError("this engine was not started from a checkpoint, so it has no place for new weights")
        try:
            return self._staging.from_source(source)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"there is no memory for new weights beside the old ones: {error}; {self._device.reclaim()}; "
                "start with a smaller --kv-cache-memory"
            ) from None

    def install_weights(self, staged: StagedWeights, weight_version: str | None = None) -> None:
        """Compute with the staged weights from the next step on; see `weights_changed` for what becomes of requests.

        Without a `weight_version` it is made of the weights' digest.
        """
        self._runner.exchange_model(staged.model)
        self.weights_changed(staged.default_version if weight_version is None else weight_version, staged.digest)

    def rename_weights(self, weight_version: str) -> None:
        """Stamp replies with another version; the weights are the same, and so is everything computed with them."""
        self._weight_version = weight_version

    def weights_changed(self, weight_version: str, weights: WeightsDigest | None = None) -> None:
        """The model's weights are new: no KV of the old ones is read again, running requests are recomputed.

        `weights` is their digest where it is known; the fingerprint changes in any case.
        """
        self._weight_version = weight_version
        self._flight = None
        self._scheduler.change_weights(weight_version)
        if self.certificate is not None:
            self.certificate = self.certificate.with_weights(weight_version, weights)
            self._fingerprint = self.fingerprint

    def cache_tensors(self) -> list[torch.Tensor]:
        """Every layer's keys, then values, for inspection; shapes as in `ForwardBatch.kv_caches`."""
        return [tensor for side in zip(*self._cache.tensors, strict=True) for tensor in side]

    def _launch(self, schedule: Schedule) -> Flight:
        """Issue a step. What a device out of memory could not compute is in the flight's `shed`."""
        batch, rows = self._runner.build(schedule)
        self._sampler.fill(rows.sampled, rows.inputs.host)
        rows.inputs.upload()
        computing = time.perf_counter()
        try:
            flight = self._compute(schedule, batch, rows)
        except torch.OutOfMemoryError as error:
            flight = Flight(schedule, rows, shed=f"{error}; {self._device.reclaim()}")
        self._operator_seconds += time.perf_counter() - computing
        return flight

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Issue the decode step that follows `flight` without waiting for its tokens, where nothing depends on them."""
        if flight.reading is None or not self.options.ahead:
            return None
        schedule = self._scheduler.ahead(flight.live())
        if schedule is None:
            return None
        batch, rows = self._runner.build_ahead(schedule, flight.rows_of(schedule.decodes))
        self._sampler.fill(rows.sampled, rows.inputs.host, ahead=1)
        rows.inputs.upload()
        computing = time.perf_counter()
        try:
            self._runner.feed(batch, flight.reading.tokens)
            ahead = self._compute(schedule, batch, rows)
            self.steps_ahead += 1
            return ahead
        except torch.OutOfMemoryError:
            # The same step comes again when `flight` was read, and fails its requests if it must.
            self._device.reclaim()
            return None
        finally:
            self._operator_seconds += time.perf_counter() - computing

    def _land(self, flight: Flight) -> list[TokenUpdate]:
        """Wait for a step's tokens and give them to the requests."""
        waiting = time.perf_counter()
        flight.read()
        self._operator_seconds += time.perf_counter() - waiting
        if flight.shed:
            return self._shed(flight)
        self._advance(flight.schedule)
        return self._commit(flight)

    @torch.inference_mode()
    def _compute(self, schedule: Schedule, batch: ForwardBatch, rows: StepRows) -> Flight:
        flight = Flight(schedule, rows)
        if rows.bucket is not None:
            logits, drawn = self._runner.replay(rows)
        else:
            hidden = self._runner.forward(batch)
            flight.poisoned = [span[0] for span in rows.prompt_spans if not self._read_prompt_span(hidden, *span)]
            if not rows.sampled:
                return flight
            logits, drawn = self._runner.logits(hidden, batch.logits_rows), None
        columns = rows.inputs.columns
        tokens = self._sampler.sample(logits, rows.sampled, columns, drawn)
        if self.options.ahead and flight.is_simple:
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
        hidden = self._runner.forward(inputs.batch)
        logits = self._runner.model.compute_logits(hidden[inputs.batch.logits_rows])
        tokens = self._operators.sample(logits, *inputs.columns)
        self._device.read(tokens, *self._logprobs.start(logits, tokens, inputs.columns.temperature))()

    def _start_reading(self, logits: torch.Tensor, tokens: torch.Tensor, rows: StepRows) -> Reading:
        """Start copying tokens to the host, and the logprobs of all of them if somebody asks for one."""
        if all(state.request.params.logprobs is None for state in rows.sampled):
            return Reading(tokens, self._device.read(tokens))
        temperature = rows.inputs.columns.temperature[: len(rows.sampled)]
        return Reading(tokens, self._device.read(tokens, *self._logprobs.start(logits, tokens, temperature)))

    def _shed(self, flight: Flight) -> list[TokenUpdate]:
        """Fail the requests whose prompts the device could not hold, or the youngest; the others are computed again."""
        schedule = flight.schedule
        states = schedule.chunks or schedule.decodes[-1:]
        return [self._finish(state, "error", error=f"out of memory: {flight.shed}") for state in states]

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

    def _advance(self, schedule: Schedule) -> None:
        for state in schedule.decodes:
            # One that ended while the step was in flight holds no page any more.
            if state.seat >= 0:
                self._scheduler.computed(state, 1)
        for state, count in zip(schedule.chunks, schedule.counts, strict=True):
            self._scheduler.computed(state, count)
            self._prompt_tokens += count

    def _commit(self, flight: Flight) -> list[TokenUpdate]:
        """Append the tokens, end what has ended, and say so."""
        updates = [self._fail(state) for state in flight.poisoned]
        for row, (state, token) in enumerate(zip(flight.rows.sampled, flight.tokens, strict=True)):
            if state.seat >= 0:
                updates.append(self._commit_token(state, token, flight.logprobs.get(row)))
        updates += [self._finish(state, "length") for state in flight.rows.complete if state.seat >= 0]
        return updates

    def _commit_token(self, state: RequestState, token: int, logprobs: PositionLogprobs | None) -> TokenUpdate:
        if token < 0:
            return self._fail(state)
        state.append(token)
        if self._fingerprint not in state.fingerprints:
            state.fingerprints.append(self._fingerprint)
        self._generated_tokens += 1
        rules, stream, text = state.stop_rules, state.text, ""
        if token in rules.eos or token in rules.stop_ids:
            reason = None if token in rules.eos else token
            return self._finish(state, "stop", token=token, logprobs=logprobs, stop_reason=reason)
        if stream is not None:
            active = state.generated > state.request.params.min_tokens
            text, stop = stream.push(token, stops_active=active)
            if stop is not None:
                return self._finish(
                    state, "stop", token=token, logprobs=logprobs, stop_reason=stop, text=text, flush=False
                )
        if state.length >= state.max_total:
            return self._finish(state, "length", token=token, logprobs=logprobs, text=text)
        return self._update(state, token, logprobs, text)

    def _fail(self, state: RequestState) -> TokenUpdate:
        return self._finish(
            state,
            "error",
            poisoned=True,
            error="the model's logits hold NaN, +inf or nothing that may be sampled; other requests are not affected",
        )

    def _finish(
        self,
        state: RequestState,
        finish: FinishReason,
        *,
        token: int | None = None,
        logprobs: PositionLogprobs | None = None,
        text: str = "",
        stop_reason: int | str | None = None,
        flush: bool = True,
        poisoned: bool = False,
        error: str | None = None,
    ) -> TokenUpdate:
        """End a request and free what it holds. `flush` shows the text that was held back."""
        if flush and state.text is not None:
            rest, stop = state.text.finish(stops_active=state.generated > state.request.params.min_tokens)
            text += rest
            if stop is not None and finish == "length":
                finish, stop_reason = "stop", stop
        self._scheduler.finish(state, poisoned=poisoned)
        self._finished += 1
        return self._update(state, token, logprobs, text, finish, stop_reason, error)

    def _update(
        self,
        state: RequestState,
        token: int | None,
        logprobs: PositionLogprobs | None,
        text: str,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> TokenUpdate:
        first, state.first_update = state.first_update, False
        return TokenUpdate(
            id=state.id,
            token_ids=[] if token is None else [token],
            text=text,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=state.prompt_logprobs if first and not state.wants_prompt_rows else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            error=error,
            cached_tokens=state.cached_tokens,
            preemptions=state.preemptions,
            seed=state.request.seed,
            weight_version=self._weight_version,
            fingerprint="" if finish is None else "+".join(state.fingerprints or [self._fingerprint]),
        )
