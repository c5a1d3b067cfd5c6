"""The HTTP application: every router, the error bodies and the gate in front, around one engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Response

from tokenspeed import __version__
from tokenspeed.server import basics, control, errors, inference, sglang, tokens, weights
from tokenspeed.server.middleware import Gate
from tokenspeed.server.service import Service

_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def create_app(service: Service) -> FastAPI:
    """The application; its lifespan opens and closes the engine client."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.client.open()
        yield
        await service.client.close()

    app = FastAPI(title="tokenspeed", version=__version__, lifespan=lifespan)
    app.state.service = service
    for routes in (
        inference.routes,
        tokens.routes,
        basics.routes,
        control.routes,
        control.about,
        sglang.routes,
        sglang.controls,
        weights.routes,
    ):
        app.include_router(routes)
    errors.install(app)
    app.add_middleware(Gate, service=service)

    page_bytes = _PAGE.read_bytes()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(page_bytes, media_type="text/html", headers={"content-security-policy": _PAGE_POLICY})

    return app
