"""The small routes: models, tokens, health, metrics, numerics, version."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Response

from tokenspeed import __version__
from tokenspeed.server.chat import read_messages
from tokenspeed.server.errors import ApiError, JsonResponse
from tokenspeed.server.metrics import CONTENT_TYPE
from tokenspeed.server.openai import DetokenizeRequest, TokenizeRequest
from tokenspeed.server.routes import ServiceDep, router
from tokenspeed.server.service import Service

routes = router(tags=["server"])


@routes.get("/v1/models")
async def models(service: ServiceDep) -> Response:
    """The served model, under each of its names."""
    return JsonResponse({"object": "list", "data": [_card(service, name) for name in service.options.model_names]})


@routes.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> Response:
    """One model by name."""
    return JsonResponse(_card(service, service.check_model(name)))


@routes.post("/tokenize")
@routes.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeRequest, service: ServiceDep) -> Response:
    """Token ids of a text, or of messages through the chat template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either `prompt` or `messages`", param="prompt")
    if body.prompt is not None:
        ids = (await service.text.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False))[0]
    else:
        ids = (await read_messages(service, body)).ids
    strings = [service.text.token_text(token) for token in ids] if body.return_token_strs else None
    most = service.limits.max_model_len
    return JsonResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings})


@routes.post("/detokenize")
@routes.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeRequest, service: ServiceDep) -> Response:
    """The text of token ids, under both of the names that clients read."""
    service.check_model(body.model)
    if len(body.tokens) > (most := service.limits.max_model_len):
        raise ApiError(400, f"tokens: {len(body.tokens)} are more than a context holds ({most})", param="tokens")
    for token in body.tokens:
        if not 0 <= token < service.limits.vocab_size:
            message = f"tokens: token id {token} is not in the vocabulary (0 to {service.limits.vocab_size - 1})"
            raise ApiError(400, message, param="tokens", reason="token_out_of_vocabulary")
    text = service.text.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return JsonResponse({"prompt": text, "text": text})


@routes.api_route("/health", methods=["GET", "HEAD"])
async def health(service: ServiceDep) -> Response:
    """200 while the engine lives and accepts requests, else 503."""
    service.check_accepting()
    return Response()


@routes.get("/ping")
@routes.post("/ping")
async def ping(service: ServiceDep) -> Response:
    """`/health` under the name that SageMaker asks for."""
    return await health(service)


@routes.get("/liveness")
async def liveness(service: ServiceDep) -> Response:
    """200 while the engine's process lives, else 503. Answered at once, whatever the engine is doing."""
    service.check_alive()
    return JsonResponse({"status": "alive"})


@routes.get("/readiness")
async def readiness(service: ServiceDep) -> Response:
    """200 while new requests are computed; 503 with the reason while weights are loading, paused or shutting down."""
    service.check_ready()
    return JsonResponse({"status": "ready"})


@routes.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Prometheus metrics; those of the engine as it last told them, while it is too busy to answer."""
    return Response(service.metrics.render(await service.stats()), media_type=CONTENT_TYPE)


@routes.get("/numerics")
async def numerics(service: ServiceDep) -> Response:
    """What is promised about bits, every switch, and the kernel chosen for every operator with the reasons."""
    info = service.info
    return JsonResponse({**info.numerics, "fingerprint": info.fingerprint, "logprobs_mode": info.logprobs_mode})


@routes.get("/version")
async def version() -> Response:
    """The version of this server."""
    return JsonResponse({"version": __version__})


@routes.get("/load")
async def load(service: ServiceDep) -> Response:
    """How many samples are in flight."""
    return JsonResponse({"server_load": service.client.in_flight})


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tokenspeed",
        "root": service.info.model_path,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "default_sampling_params": asdict(service.limits.defaults),
        "permission": [],
    }
