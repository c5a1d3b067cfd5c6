"""The OpenAI routes that generate."""

from __future__ import annotations

from fastapi import Request, Response

from tokenspeed.server.chat import ChatCompletion
from tokenspeed.server.completions import Completion
from tokenspeed.server.errors import JsonResponse
from tokenspeed.server.openai import ChatCompletionRequest, CompletionRequest
from tokenspeed.server.routes import RequestId, ServiceDep, router
from tokenspeed.server.stream import EventStream, reply

routes = router(tags=["OpenAI"])


@routes.post("/v1/completions")
async def completions(
    body: CompletionRequest, request: Request, service: ServiceDep, request_id: RequestId
) -> Response:
    """Continue one or many prompts, given as text or token ids."""
    work = await Completion.prepare(service, body, request_id)
    return await _answer(request, work, stream=bool(body.stream))


@routes.post("/v1/chat/completions")
async def chat_completions(
    body: ChatCompletionRequest, request: Request, service: ServiceDep, request_id: RequestId
) -> Response:
    """Answer a conversation, through the model's own chat template."""
    work = await ChatCompletion.prepare(service, body, request_id)
    return await _answer(request, work, stream=bool(body.stream))


async def _answer(request: Request, work: Completion | ChatCompletion, *, stream: bool) -> Response:
    if stream:
        return EventStream(work.events())

    async def whole() -> Response:
        return JsonResponse(await work.reply())

    return await reply(request, whole())
