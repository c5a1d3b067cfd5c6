"""SGLang's native routes: `/generate` and the control routes that trainers call on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Response

from tokenspeed.engine.request import PositionLogprobs, SamplingParams, TokenLogprob
from tokenspeed.server.control import guard
from tokenspeed.server.errors import ApiError, JsonResponse
from tokenspeed.server.fields import StrictModel
from tokenspeed.server.generation import Generation, Job, Prompt, Sample, encoded
from tokenspeed.server.logprobs import base64_logprobs, json_logprob
from tokenspeed.server.prompts import read_prompts
from tokenspeed.server.routes import RequestId, ServiceDep, router
from tokenspeed.server.service import Service
from tokenspeed.server.sglang_schema import GenerateRequest
from tokenspeed.server.stream import EventStream, event, reply

routes = router(tags=["SGLang"])
controls = router(tags=["SGLang control"], dependencies=[Depends(guard)])
HEALTH_SECONDS = 20.0


@routes.api_route("/generate", methods=["POST", "PUT"])
async def generate(body: GenerateRequest, request: Request, service: ServiceDep, request_id: RequestId) -> Response:
    """Continue one prompt, or a batch of them, given as text or token ids."""
    param = "text" if body.text is not None else "input_ids"
    prompts = await read_prompts(service, body.prompt, add_special_tokens=True, param=param)
    sampling = body.sampling_of(len(prompts))
    rids = body.rids(len(prompts), request_id)
    jobs = [
        Job(prompt, body.params(asked, service.limits), rid)
        for prompt, asked, rid in zip(prompts, sampling, rids, strict=True)
    ]
    service.limits.check_samples(sum(job.params.n for job in jobs), 1)
    for job in jobs:
        service.limits.check_prompt(job.prompt.ids, job.params)
    writer = _Writer(service, body)
    is_list = body.is_batch or len(jobs) > 1 or jobs[0].params.n > 1
    if body.stream:
        return EventStream(_events(service, jobs, writer, is_list))
    return await reply(request, _whole(service, jobs, writer, is_list))


async def _whole(service: Service, jobs: list[Job], writer: _Writer, is_list: bool) -> Response:
    with Generation(service, jobs) as generation:
        samples = await generation.finish()
    items = await encoded(samples, lambda sample: writer.item(sample, generation.started_at))
    return JsonResponse(items if is_list else items[0])


async def _events(service: Service, jobs: list[Job], writer: _Writer, is_list: bool) -> AsyncGenerator[bytes, None]:
    """Every event holds everything so far, as SGLang sends it."""
    with Generation(service, jobs, prompt_logprobs_once=False) as generation:
        async for batch in generation.batches():
            data = b""
            for sample, _ in batch:
                item = writer.item(sample, generation.started_at)
                data += event({**item, "index": sample.index} if is_list else item)
            yield data


class _Writer:
    """Writes samples in SGLang's shape."""

    def __init__(self, service: Service, body: GenerateRequest) -> None:
        self._service = service
        self._body = body

    def item(self, sample: Sample, started_at: float) -> dict[str, Any]:
        """The sample as it is now; `finish_reason` is null until it has ended."""
        meta: dict[str, Any] = {
            "id": sample.job.external_id,
            "finish_reason": _finish(sample),
            "prompt_tokens": len(sample.prompt.ids),
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": sample.cached_tokens,
            "num_retractions": sample.preemptions,
            "weight_version": sample.weight_version,
            "weight_versions": sample.version_spans(),
            "e2e_latency": time.monotonic() - started_at,
            "sampling_seed": sample.seed,
            "system_fingerprint": sample.fingerprint or self._service.info.fingerprint,
        }
        if self._body.return_prompt_token_ids:
            meta["prompt_token_ids"] = sample.prompt.ids
        if self._body.return_logprob:
            meta |= self._logprobs(sample, sample.job.params)
        return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": meta}

    def _logprobs(self, sample: Sample, params: SamplingParams) -> dict[str, Any]:
        start = self._body.logprob_start_len or 0
        inputs: Sequence[PositionLogprobs | None] = (sample.prompt_logprobs or [])[start:]
        # The first reported prompt token has a null logprob, whatever its position.
        inputs = [None, *inputs[1:]] if inputs else []
        if self._body.logprobs_encoding == "base64":
            return {
                "input_token_logprobs": base64_logprobs(inputs),
                "output_token_logprobs": base64_logprobs(sample.logprobs),
                "output_token_logprobs_length": len(sample.logprobs),
            }
        ids = sample.prompt.ids[start:] if inputs else []
        found: dict[str, Any] = {
            "input_token_logprobs": [
                [None, token, self._text(token)] if entry is None else self._triple(entry.token)
                for token, entry in zip(ids, inputs, strict=True)
            ],
            "output_token_logprobs": [self._triple(entry.token) for entry in sample.logprobs],
            "output_token_logprobs_length": len(sample.logprobs),
        }
        top = params.logprobs or 0
        if top:
            found["input_top_logprobs"] = [entry and self._top(entry, top) for entry in inputs]
            found["output_top_logprobs"] = [self._top(entry, top) for entry in sample.logprobs]
        if params.logprob_token_ids:
            found["output_token_ids_logprobs"] = [
                self._chosen(entry, params.logprob_token_ids) for entry in sample.logprobs
            ]
        return found

    def _top(self, entry: PositionLogprobs, top: int) -> list[list[Any]]:
        return [self._triple(item) for item in entry.top[:top]]

    def _chosen(self, entry: PositionLogprobs, ids: list[int]) -> list[list[Any]]:
        by_id = {item.id: item for item in (*entry.top, entry.token)}
        return [self._triple(by_id[token]) for token in ids]

    def _triple(self, item: TokenLogprob) -> list[Any]:
        return [json_logprob(item.logprob), item.id, self._text(item.id)]

    def _text(self, token: int) -> str | None:
        return self._service.text.token_text(token) if self._body.return_text_in_logprobs else None


def _finish(sample: Sample) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "stop":
            matched = sample.token_ids[-1] if sample.stop_reason is None else sample.stop_reason
            return {"type": "stop", "matched": matched}
        case "abort":
            message = "Aborted by request" if sample.token_ids else "Abort before prefill"
            return {"type": "abort", "message": message, "status_code": 499, "err_type": "AbortedError"}
        case _:
            return {"type": "length", "length": len(sample.token_ids)}


class AbortRequest(StrictModel):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseGeneration(StrictModel):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(StrictModel):
    """`POST /continue_generation`."""

    ignored = frozenset({"torch_empty_cache"})


@controls.post("/abort_request")
async def abort_request(body: AbortRequest, service: ServiceDep) -> Response:
    """End one request, or all; what they have generated is still returned."""
    if body.rid is None and not body.abort_all:
        raise ApiError(400, "give `rid`, or `abort_all`: true", param="rid")
    service.abort(None if body.abort_all else [body.rid or ""])
    return Response()


@controls.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(service: ServiceDep, timeout: Annotated[float, Query(ge=0, le=600)] = 0.0) -> Response:
    """Forget cached prefixes; 400 while requests run or wait (after `timeout` seconds of waiting for them)."""
    if not await service.idle(timeout) and service.client.dead is None:
        raise ApiError(400, "the cache is not flushed: requests are running or waiting", reason="busy")
    await service.client.call("reset_prefix_cache")
    return Response("Cache flushed.\n", media_type="text/plain")


@controls.post("/pause_generation")
async def pause_generation(service: ServiceDep, body: PauseGeneration | None = None) -> Response:
    """Stop between two steps: end what runs (`abort`), or freeze it (`in_place`, `retract`). New requests wait."""
    await service.pause("abort" if body is None or body.mode == "abort" else "keep", keep_accepting=True)
    return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})


@controls.post("/continue_generation")
async def continue_generation(service: ServiceDep, body: ContinueGeneration | None = None) -> Response:
    """Go on after `/pause_generation`."""
    del body
    await service.resume()
    return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})


@routes.get("/health_generate")
async def health_generate(service: ServiceDep) -> Response:
    """200 when one token can really be generated within 20 s, else 503."""
    job = Job(Prompt([0]), SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), "health")
    try:
        with Generation(service, [job]) as generation:
            async with asyncio.timeout(HEALTH_SECONDS):
                await generation.finish()
    except TimeoutError:
        raise ApiError(503, f"no token within {HEALTH_SECONDS:g} s", reason="engine_stuck") from None
    return Response()


@routes.get("/model_info")
@routes.get("/get_model_info", include_in_schema=False)
async def model_info(service: ServiceDep) -> Response:
    """What is served."""
    info = service.info
    return JsonResponse(
        {
            "model_path": info.model_path,
            "served_model_name": service.model_name,
            "tokenizer_path": (service.options.public or {}).get("tokenizer") or info.model_path,
            "is_generation": True,
            "preferred_sampling_params": service.limits.defaults.changed() or None,
            "weight_version": info.weight_version,
            "load_format": "safetensors",
            "architectures": [info.architecture],
            "dtype": info.dtype,
            "max_model_len": service.limits.max_model_len,
        }
    )


@routes.get("/get_weight_version")
@routes.get("/weight_info", include_in_schema=False)
async def get_weight_version(service: ServiceDep) -> Response:
    """The version of the weights that compute now."""
    return JsonResponse({"weight_version": service.info.weight_version})


@routes.get("/v1/loads")
async def loads(service: ServiceDep, include: Annotated[str, Query(max_length=64)] = "core") -> Response:
    """How many samples run and wait, by data-parallel rank."""
    del include  # there are only the core numbers
    service.check_alive()
    stats = await service.stats()
    running, waiting = stats.get("running", 0), stats.get("waiting", 0)
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": max(running + waiting, service.client.in_flight),
        "num_used_tokens": stats.get("pages_used", 0) * 16,
        "max_total_num_tokens": service.info.kv_tokens,
    }
    return JsonResponse({"dp_rank_count": 1, "loads": [load]})
