"""How a route reads a JSON body and finds the service."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from tokenspeed.server.errors import ApiError
from tokenspeed.server.service import Service


class _JsonRequest(Request):
    """Bodies are decoded by msgspec: fast, and strict about JSON (no NaN, no lone surrogates, no deep nesting)."""

    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", reason="invalid_json") from None


class JsonRoute(APIRoute):
    """A route whose request is a `_JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def router(**options: Any) -> APIRouter:
    """A router for JSON routes."""
    return APIRouter(route_class=JsonRoute, **options)


# Dependencies are coroutines: FastAPI sends plain functions through its thread pool, which costs more than they do.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _request_id(request: Request) -> str:
    return str(request.state.request_id)


ServiceDep = Annotated[Service, Depends(_service)]
RequestId = Annotated[str, Depends(_request_id)]
