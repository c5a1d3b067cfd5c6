"""What happens to every HTTP request before any route: its id, key, size and type, and its place in the metrics."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.server.errors import ApiError, error_response
from tokenspeed.server.service import Service

_log = logging.getLogger("tokenspeed.server")
REQUEST_ID_HEADER = "x-request-id"
_PRINTABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_GUARDED = ("/v1", "/inference", "/generate", "/tokenize", "/detokenize")
"""Beginnings of the paths that need an API key when there is one."""


class Gate:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _PRINTABLE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        # Where no reply begins and no error is raised, the client has gone.
        started, status, has_started = time.monotonic(), 499, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            self._check_type(headers)
            await self._app(scope, self._limited(headers, receive), send_with_id)
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("%s %s failed", scope["method"], scope["path"])
            if has_started:
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._service.metrics.http(scope["method"], route, status, time.monotonic() - started)

    def _check_key(self, path: str, headers: Headers) -> None:
        keys = self._service.options.api_keys
        if not keys or not path.startswith(_GUARDED) or matches_key(headers, keys):
            return
        challenge = {"www-authenticate": "Bearer"}
        raise ApiError(401, "missing or wrong API key: send `Authorization: Bearer KEY`", headers=challenge)

    def _check_type(self, headers: Headers) -> None:
        """A body must be JSON; control routes may have none."""
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """`receive` that refuses a body over the limit, whether or not the client announces its size."""
        most = self._service.limits.max_body_bytes
        too_large = ApiError(413, f"the request body is larger than the maximum of {most} bytes")
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > most:
            raise too_large
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise too_large
            return message

        return limited


def matches_key(headers: Headers, keys: tuple[str, ...]) -> bool:
    """Whether the request carries one of `keys` as a bearer token or in `X-API-Key`; compared in constant time."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    sent = [bearer.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return any(hmac.compare_digest(key.encode(), text.encode()) for key in keys for text in sent if text)
