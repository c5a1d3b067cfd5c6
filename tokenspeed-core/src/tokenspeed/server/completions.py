"""`POST /v1/completions`: one or many prompts, as text or token ids, continued `n` times each."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from tokenspeed.engine.request import PositionLogprobs, SamplingParams, TokenUpdate
from tokenspeed.server.generation import Generation, Job, Prompt, Sample, encoded
from tokenspeed.server.logprobs import LogprobWriter, base64_logprobs, cut
from tokenspeed.server.openai import CompletionRequest
from tokenspeed.server.prompts import read_prompts
from tokenspeed.server.service import Service
from tokenspeed.server.stream import event


class Completion:
    """One request of the route, checked and ready to run. Build it with `prepare`."""

    def __init__(
        self, service: Service, body: CompletionRequest, params: SamplingParams, prompts: list[Prompt], request_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._prompts = prompts
        self._skip_special = params.skip_special_tokens
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.check_model(body.model),
            **service.limits.stated,
        }

    @classmethod
    async def prepare(cls, service: Service, body: CompletionRequest, request_id: str) -> Completion:
        """Check everything that can be checked before the engine hears of it. Raises ApiError or RequestError."""
        service.check_model(body.model)
        params = body.sampling_params(
            service.limits,
            logprobs=body.logprobs,
            max_tokens=body.completion_tokens_limit,
            defaults=service.limits.defaults,
        )
        if body.echo and body.logprobs is not None:
            params = _with_prompt_logprobs(params, body.logprobs)
        prompts = await read_prompts(service, body.prompt, add_special_tokens=body.add_special_tokens is not False)
        service.limits.check_samples(len(prompts), params.n)
        for prompt in prompts:
            service.limits.check_prompt(prompt.ids, params)
        return cls(service, body, params, prompts, body.request_id or request_id)

    async def reply(self) -> dict[str, Any]:
        """The whole reply."""
        with self._start(prompt_logprobs_once=True) as generation:
            samples = await generation.finish()
            reply: dict[str, Any] = {
                **self._head,
                "choices": await encoded(samples, self._whole),
                "usage": generation.usage(),
                "system_fingerprint": generation.fingerprint(),
            }
        if self._body.logprobs is not None or self._body.prompt_logprobs is not None:
            reply["logprobs_mode"] = self._service.limits.logprobs_mode
        return reply

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events, without the final `[DONE]`."""
        options = self._body.stream_options
        with self._start(prompt_logprobs_once=False) as generation:
            writers = [self._writer() for _ in generation.samples]
            started: set[int] = set()
            async for batch in generation.batches():
                data = b""
                for sample, update in batch:
                    is_first = sample.index not in started
                    started.add(sample.index)
                    choice = self._choice(sample, writers[sample.index], update, is_first=is_first)
                    chunk: dict[str, Any] = {**self._head, "choices": [choice]}
                    if update.finish_reason is not None:
                        chunk["system_fingerprint"] = sample.fingerprint
                    if options is not None and options.continuous_usage_stats:
                        chunk["usage"] = generation.usage()
                    data += event(chunk)
                yield data
            if options is not None and options.include_usage:
                yield event({**self._head, "choices": [], "usage": generation.usage()})

    def _whole(self, sample: Sample) -> dict[str, Any]:
        return self._choice(sample, self._writer(), sample.whole(), is_first=True, is_whole=True)

    def _start(self, *, prompt_logprobs_once: bool) -> Generation:
        jobs = [Job(prompt, self._params, str(self._head["id"])) for prompt in self._prompts]
        return Generation(self._service, jobs, prompt_logprobs_once=prompt_logprobs_once)

    def _writer(self) -> LogprobWriter:
        return LogprobWriter(
            self._service.text,
            ids_as_tokens=bool(self._body.return_tokens_as_token_ids),
            skip_special_tokens=self._skip_special,
        )

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._service.text.decode(prompt.ids, skip_special_tokens=self._skip_special)

    def _choice(
        self, sample: Sample, writer: LogprobWriter, part: TokenUpdate, *, is_first: bool, is_whole: bool = False
    ) -> dict[str, Any]:
        """What `part` adds to the choice; the whole choice when `part` is everything."""
        body, is_last = self._body, part.finish_reason is not None
        echo = bool(body.echo) and is_first
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": (self._prompt_text(sample.prompt) if echo else "") + part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.logprobs is not None:
            ids, entries = part.token_ids, list[PositionLogprobs | None](part.logprobs or [])
            if echo:
                # A sample that was ended before its prompt was read has no logprobs of it.
                prompt = sample.prompt_logprobs or [None] * len(sample.prompt.ids)
                ids, entries = sample.prompt.ids + ids, cut(prompt, body.logprobs) + entries
            choice["logprobs"] = (
                {"token_logprobs": base64_logprobs(entries)} if body.in_base64 else writer.completion(ids, entries)
            )
        if body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if is_first:
                choice["prompt_token_ids"] = sample.prompt.ids
        if is_whole and body.prompt_logprobs is not None:
            prompt = cut(sample.prompt_logprobs or [], body.prompt_logprobs)
            choice["prompt_logprobs"] = base64_logprobs(prompt) if body.in_base64 else writer.prompt(prompt)
        if is_last:
            choice["seed"] = sample.seed
            if body.return_weight_versions:
                choice["weight_versions"] = sample.version_spans()
        return choice


def _with_prompt_logprobs(params: SamplingParams, logprobs: int) -> SamplingParams:
    """`echo` shows the prompt's logprobs with the same number of alternatives, beside those that were asked for."""
    asked = params.prompt_logprobs
    most = logprobs if asked is None else -1 if -1 in (asked, logprobs) else max(asked, logprobs)
    return msgspec.structs.replace(params, prompt_logprobs=most)
