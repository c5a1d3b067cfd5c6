"""The samples of one HTTP request, as they grow. Knows prompts and samples; knows no route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from tokenspeed.engine.request import FinishReason, PositionLogprobs, SamplingParams, TokenUpdate
from tokenspeed.engine.seeds import derive_seed, fresh_seed
from tokenspeed.engine.wire import Group
from tokenspeed.server.errors import ApiError

if TYPE_CHECKING:
    from tokenspeed.server.service import Service

_SLICE_SECONDS = 0.005
"""How long one reply may be written before the event loop does something else."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that they came from when the client sent text."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class Job:
    """One prompt to continue `params.n` times; `external_id` is what an abort names."""

    prompt: Prompt
    params: SamplingParams
    external_id: str


@dataclass
class Sample:
    """One continuation: `index` counts all samples of the request, prompt-major; `seed` replays it alone.

    `first` is the index of the first sample of the same prompt. `weight_version` computed the newest token; while there
    is none, it is what the engine last said.
    """

    index: int
    first: int
    job: Job
    seed: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    weight_version: str = ""
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    fingerprint: str = ""
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def prompt(self) -> Prompt:
        """What is continued."""
        return self.job.prompt

    def absorb(self, update: TokenUpdate) -> None:
        """Add what a step brought. Raises ApiError when the engine reports that this sample failed."""
        self.finish_reason = update.finish_reason
        if update.finish_reason == "error":
            raise ApiError(500, update.error or "the engine failed on this request", reason="sample_failed")
        if update.token_ids or not self.token_ids:
            self.weight_version = update.weight_version
        if update.token_ids and (not self.weight_versions or self.weight_versions[-1][0] != update.weight_version):
            self.weight_versions.append((update.weight_version, len(self.token_ids)))
        self.token_ids += update.token_ids
        self.text += update.text
        self.logprobs += update.logprobs or ()
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.stop_reason = update.stop_reason
        self.cached_tokens = update.cached_tokens
        self.preemptions = update.preemptions
        self.fingerprint = update.fingerprint

    def whole(self) -> TokenUpdate:
        """Everything so far as one update, for replies that are not streamed."""
        return TokenUpdate(
            id="",
            token_ids=self.token_ids,
            text=self.text,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def version_spans(self) -> list[dict[str, object]]:
        """Which weights computed which of the output tokens: `[{version, start, end}]`."""
        spans = pairwise([*self.weight_versions, ("", len(self.token_ids))])
        return [{"version": version, "start": start, "end": end} for (version, start), (_, end) in spans]


class Generation:
    """All samples of one HTTP request. Use as a context manager: leaving it aborts what still runs.

    Each sample gets its own seed, and its `max_tokens` and `min_tokens` clamped to the context. With
    `prompt_logprobs_once` only the first sample of a prompt reads the prompt's logprobs; the others share them.
    """

    def __init__(self, service: Service, jobs: Sequence[Job], *, prompt_logprobs_once: bool = True) -> None:
        self.jobs = jobs
        self.started_at = time.monotonic()
        self.samples: list[Sample] = []
        self._service = service
        self._by_id: dict[str, Sample] = {}
        groups = [self._group(job, prompt_logprobs_once) for job in jobs]
        service.admit(len(self.samples))
        self._stream = service.client.submit(groups)
        service.started(self)

    def _group(self, job: Job, prompt_logprobs_once: bool) -> Group:
        """The job as the engine takes it; its samples join `samples`."""
        service, first, named = self._service, len(self.samples), []
        for i in range(job.params.n):
            seed = fresh_seed() if job.params.seed is None else derive_seed(job.params.seed, i)
            sample = Sample(len(self.samples), first, job, seed)
            request_id = service.client.unique_id(job.external_id)
            self.samples.append(sample)
            self._by_id[request_id] = sample
            named.append((request_id, seed))
        most = service.limits.output_tokens(len(job.prompt.ids), job.params.max_tokens)
        least = min(job.params.min_tokens, most)
        return Group(
            prompt=job.prompt.ids,
            params=msgspec.structs.replace(job.params, n=1, seed=None, max_tokens=most, min_tokens=least),
            samples=named,
            arrival=self.started_at,
            prompt_logprobs_once=prompt_logprobs_once,
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.close()
        self._service.ended(self)

    @property
    def engine_ids(self) -> Iterator[tuple[str, str]]:
        """(external id, id inside the engine) of every sample."""
        return ((sample.job.external_id, engine_id) for engine_id, sample in self._by_id.items())

    async def batches(self) -> AsyncIterator[list[tuple[Sample, TokenUpdate]]]:
        """What has arrived since the last time, until every sample has finished. Samples are already updated.

        Raises EngineDead, RequestError or ApiError.
        """
        async for updates in self._stream.batches():
            batch = []
            for update in updates:
                sample = self._by_id[update.id]
                sample.absorb(update)
                self._service.metrics.observe(self, sample, update)
                batch.append((sample, update))
            yield batch

    async def finish(self) -> list[Sample]:
        """Wait for all samples."""
        async for _ in self.batches():
            pass
        for sample in self.samples:
            if sample.prompt_logprobs is None:
                sample.prompt_logprobs = self.samples[sample.first].prompt_logprobs
        return self.samples

    def fingerprint(self) -> str:
        """What determined the bits of the samples that have finished; several if weights were exchanged meanwhile."""
        distinct = dict.fromkeys(sample.fingerprint for sample in self.samples if sample.fingerprint)
        return "+".join(distinct)

    def usage(self) -> dict[str, object]:
        """OpenAI's token counts over all samples; a prompt counts once, however many samples it has."""
        prompt_tokens = sum(len(job.prompt.ids) for job in self.jobs)
        return usage(
            prompt_tokens,
            sum(len(sample.token_ids) for sample in self.samples),
            sum(sample.cached_tokens for sample in self.samples if sample.index == sample.first),
        )


async def encoded(samples: Iterable[Sample], write: Callable[[Sample], Any]) -> list[msgspec.Raw]:
    """What `write` makes of each sample, as JSON. A large reply takes seconds to write; others have their turn between.

    Nothing is kept of a sample but its text, which is a tenth of the lists and mappings that it is made from.
    """
    written, since = [], time.monotonic()
    for sample in samples:
        written.append(msgspec.Raw(msgspec.json.encode(write(sample))))
        if time.monotonic() - since > _SLICE_SECONDS:
            await asyncio.sleep(0)
            since = time.monotonic()
    return written


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
