"""`POST /inference/v1/generate`: token ids in, token ids out, no text at all (vLLM's scale-out route)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from pydantic import Field

from tokenspeed.engine.request import PositionLogprobs, TokenLogprob
from tokenspeed.server.errors import ApiError, JsonResponse
from tokenspeed.server.fields import UNSUPPORTED, ListOf, StrictModel
from tokenspeed.server.generation import Generation, Job, Prompt, Sample, encoded
from tokenspeed.server.logprobs import LogprobWriter, base64_logprobs, cut, json_logprob
from tokenspeed.server.openai import DEFAULT_MAX_TOKENS, SamplingFields
from tokenspeed.server.routes import RequestId, ServiceDep, router
from tokenspeed.server.service import Service
from tokenspeed.server.stream import EventStream, event, reply

routes = router(tags=["tokens"])


class TokenSampling(SamplingFields):
    """vLLM's `SamplingParams` as JSON."""

    ignored = frozenset({"detokenize", "flat_logprobs", "output_kind", "spaces_between_special_tokens"})
    unsupported: ClassVar = UNSUPPORTED | {"extra_args": (), "skip_reading_prefix_cache": (), "stream_interval": (1,)}

    logprobs: Annotated[int, Field(ge=-1)] | None = None


class TokenRequest(StrictModel):
    """The body of the route."""

    ignored = frozenset({"cache_salt", "priority", "return_token_ids", "session_id", "stream_options"})
    unsupported: ClassVar = {"features": (), "kv_transfer_params": (), "lora_path": ()}

    token_ids: ListOf[int]
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    stream: bool | None = None
    output_mode: Literal["tokens"] = "tokens"


@routes.post("/inference/v1/generate")
async def generate(body: TokenRequest, request: Request, service: ServiceDep, request_id: RequestId) -> Response:
    """Continue a prompt of token ids."""
    service.check_model(body.model)
    asked = body.sampling_params
    if body.stream and asked.prompt_logprobs is not None:
        raise ApiError(400, "`prompt_logprobs` is not available with `stream`: true", param="prompt_logprobs")
    most = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    params = asked.sampling_params(service.limits, logprobs=asked.logprobs, max_tokens=most)
    prompt = Prompt(body.token_ids)
    service.limits.check_samples(1, params.n)
    service.limits.check_prompt(prompt.ids, params)
    job = Job(prompt, params, body.request_id or request_id)
    if body.stream:
        return EventStream(_events(service, job, asked))
    return await reply(request, _whole(service, job, asked))


async def _whole(service: Service, job: Job, asked: TokenSampling) -> Response:
    with Generation(service, [job]) as generation:
        samples = await generation.finish()
    content: dict[str, Any] = {
        "request_id": job.external_id,
        "choices": await encoded(samples, lambda s: _choice(service, s, asked, s.token_ids, s.logprobs)),
        "prompt_logprobs": None,
        "usage": generation.usage(),
        "system_fingerprint": generation.fingerprint(),
    }
    if job.params.prompt_logprobs is not None:
        writer = LogprobWriter(service.text, ids_as_tokens=False, skip_special_tokens=True)
        entries = cut(samples[0].prompt_logprobs or [], job.params.prompt_logprobs)
        content["prompt_logprobs"] = base64_logprobs(entries) if asked.in_base64 else writer.prompt(entries)
    return JsonResponse(content)


async def _events(service: Service, job: Job, asked: TokenSampling) -> AsyncGenerator[bytes, None]:
    with Generation(service, [job]) as generation:
        async for batch in generation.batches():
            yield b"".join(
                event(
                    {
                        "request_id": job.external_id,
                        "choices": [_choice(service, sample, asked, update.token_ids, update.logprobs or [])],
                    }
                )
                for sample, update in batch
            )
        yield event({"request_id": job.external_id, "choices": [], "usage": generation.usage()})


def _choice(
    service: Service, sample: Sample, asked: TokenSampling, token_ids: list[int], entries: list[PositionLogprobs]
) -> dict[str, Any]:
    """One choice, or what a step added to it; the ending is there once the sample has finished."""
    choice: dict[str, Any] = {
        "index": sample.index,
        "token_ids": token_ids,
        "logprobs": None,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.job.params.logprobs is not None and asked.in_base64:
        choice["logprobs"] = {"token_logprobs": base64_logprobs(entries)}
    elif sample.job.params.logprobs is not None:
        choice["logprobs"] = {
            "content": [
                {**_record(service, entry.token), "top_logprobs": [_record(service, item) for item in entry.top]}
                for entry in entries
            ]
        }
    if sample.finish_reason is not None:
        choice |= {"seed": sample.seed, "weight_versions": sample.version_spans()}
    return choice


def _record(service: Service, item: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": item.id,
        "token": f"token_id:{item.id}",
        "logprob": json_logprob(item.logprob),
        "rank": item.rank,
        "bytes": list(service.text.token_bytes(item.id)),
    }
