"""The engine: samples in, tokens out, one `step` at a time.

`Engine.step` tells the story; the nouns that it uses each have a file: `scheduler`, `kv_cache`, `prefix_cache` choose
what a step computes; `executor` computes it, with `runner`, `sampler` and `logprobs`; a `flight` is a step on its way;
`committer` gives its tokens to the requests (`state`, `text`). Not thread-safe: one thread owns an engine.

What is computed for a sample is a function of its tokens, parameters and seed. Chunking, caching, preemption and
neighbours decide only *when* something is computed; a token that was sampled once is never sampled again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from tokenspeed.engine.committer import Committer, Stamp
from tokenspeed.engine.device import Device, open_device
from tokenspeed.engine.executor import Executor
from tokenspeed.engine.flight import Flight
from tokenspeed.engine.kv_cache import KVCache, pages_for
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.penalties import TokenCounts
from tokenspeed.engine.request import Request, TokenUpdate
from tokenspeed.engine.runner import Model, Observer
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.engine.state import RequestState
from tokenspeed.engine.stopping import StopRules
from tokenspeed.engine.text import TextStream
from tokenspeed.engine.validation import Limits, validate
from tokenspeed.errors import CheckpointError, RequestError
from tokenspeed.loading.update import NamedTensors, StagedWeights, WeightStaging
from tokenspeed.numerics.certificate import Certificate
from tokenspeed.numerics.weights import WeightsDigest
from tokenspeed.tokenizer import Tokenizer


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
            vocab_size=model.vocab_size,
            max_model_len=options.max_model_len,
            max_logprobs=options.max_logprobs,
            # A checkpoint may name an id that the model has no logit for; such an id never comes.
            eos_ids=tuple(token for token in options.eos_ids if 0 <= token < model.vocab_size),
        )
        self.tokenizer = tokenizer
        self.certificate = certificate
        self._staging = staging
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
        self._executor = Executor(model, operators, self._cache, self._device, options)
        self._committer = Committer(self._scheduler, Stamp(options.weight_version, self.fingerprint))
        self._flight: Flight | None = None
        self._steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Some request waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def device(self) -> Device:
        """Where steps run."""
        return self._device

    @property
    def fingerprint(self) -> str:
        """What determines the bits, in short; empty for an engine without a certificate."""
        return "" if self.certificate is None else self.certificate.fingerprint

    @property
    def model(self) -> Model:
        """The model that computes; another object once new weights were installed."""
        return self._executor.model

    @property
    def weight_version(self) -> str:
        """Names the weights that compute from now on; stamped on every update."""
        return self._committer.stamp.weight_version

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
        rules = StopRules.of(params, self.limits.eos_ids)
        self._scheduler.add(RequestState(request, most, rules, text, counts))

    def abort(self, request_id: str) -> TokenUpdate | None:
        """Free everything that a sample holds, now. Its last update, or None when no such sample waits or runs."""
        state = self._scheduler.find(request_id)
        return None if state is None else self._committer.abort(state)

    def step(self) -> list[TokenUpdate]:
        """One forward pass over what the scheduler chose, and what it added to each request."""
        if not self.has_work:
            return []
        started = time.perf_counter()
        with self._device.current():
            resumed = self._flight if self._flight and self._flight.live() else None
            flight = resumed or self._executor.launch(self._scheduler.schedule())
            self._flight = self._launch_ahead(flight)
            self._executor.wait(flight)
        updates = self._committer.commit(flight)
        self._steps += 1
        self._step_seconds += time.perf_counter() - started
        return updates

    def warm_up(self) -> Iterator[tuple[int, int]]:
        """Record the decode steps of every bucket and compute steps of every kind once, before the first request.

        Yields how much is done, and of how much. It shows at once that the memory is enough, and compiles what a GPU's
        kernels compile, which would hold up a step otherwise. Without it a bucket is recorded when it is first needed.
        A CPU has nothing to warm up.
        """
        parts = self._executor.warm_up()
        while True:
            with self._device.current():
                done = next(parts, None)
            if done is None:
                return
            yield done

    @property
    def replays(self) -> int:
        """Decode steps that ran as recorded ones."""
        return self._executor.replays

    @property
    def steps_ahead(self) -> int:
        """Steps that were issued before the tokens of the one in front of them were read."""
        return self._executor.steps_ahead

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        scheduler, cache, committer = self._scheduler, self._cache, self._committer
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
            prompt_tokens=committer.prompt_tokens,
            generated_tokens=committer.generated_tokens,
            finished_requests=committer.finished_requests,
            step_seconds=self._step_seconds,
            operator_seconds=self._executor.operator_seconds,
        )

    def observe(self, observer: Observer | None) -> None:
        """Tell `observer` of every step from now on, or nobody."""
        self._executor.observe(observer)

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
        return [self._committer.abort(state) for state in states]

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
        with self._device.current():
            try:
                return self._staging.from_source(source)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # Behind the handler: the error's traceback held what was read so far.
            free = self._device.reclaim()
        raise CheckpointError(
            f"there is no memory for new weights beside the old ones: {reason}; {free}; "
            "start with a smaller --kv-cache-memory"
        )

    def install_weights(self, staged: StagedWeights, weight_version: str | None = None) -> None:
        """Compute with the staged weights from the next step on; see `weights_changed` for what becomes of requests.

        Without a `weight_version` it is made of the weights' digest.
        """
        self._executor.exchange_model(staged.model)
        self.weights_changed(staged.default_version if weight_version is None else weight_version, staged.digest)

    def rename_weights(self, weight_version: str) -> None:
        """Stamp replies with another version; the weights are the same, and so is everything computed with them."""
        self._committer.stamp = replace(self._committer.stamp, weight_version=weight_version)

    def weights_changed(self, weight_version: str, weights: WeightsDigest | None = None) -> None:
        """The model's weights are new: no KV of the old ones is read again, running requests are recomputed.

        `weights` is their digest where it is known; the fingerprint changes in any case.
        """
        self._flight = None
        self._scheduler.change_weights(weight_version)
        if self.certificate is not None:
            self.certificate = self.certificate.with_weights(weight_version, weights)
        self._committer.stamp = Stamp(weight_version, self.fingerprint)

    def cache_tensors(self) -> list[torch.Tensor]:
        """Every layer's keys, then values, for inspection; shapes as in `ForwardBatch.kv_caches`."""
        return [tensor for side in zip(*self._cache.tensors, strict=True) for tensor in side]

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Issue the decode step that follows `flight` without waiting for its tokens, where nothing depends on them."""
        schedule = None if flight.reading is None else self._scheduler.ahead(flight.live())
        return None if schedule is None else self._executor.launch_ahead(schedule, flight)
