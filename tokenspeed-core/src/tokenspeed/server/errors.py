"""Every error reply: an OpenAI body, whatever went wrong and wherever.

The shape is vLLM's: `{"error": {"message", "type", "param", "code"}}` with `code` the HTTP status, plus `reason`, a
stable identifier such as `context_length_exceeded`, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tokenspeed.errors import ContextOverflow, EngineDead, RequestError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "BadRequestError",
    413: "BadRequestError",
    431: "BadRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# A hostile body must not be echoed back: at most this many problems, each cut to this many characters.
_MAX_PROBLEMS = 10
_MAX_PROBLEM_CHARS = 200
_MAX_MESSAGE_CHARS = 2000


class ApiError(HTTPException):
    """An error with its HTTP status; `param` names the field, `reason` is a stable identifier."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        self.param = param
        self.reason = reason


class JsonResponse(Response):
    """A reply that msgspec encodes: floats as the shortest text that reads back to the same double."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(status: int, message: str, param: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """The body of an error reply, and of an error event inside a stream."""
    error = {"message": message[:_MAX_MESSAGE_CHARS], "type": _TYPES.get(status, "BadRequestError"), "param": param}
    return {"error": error | {"code": status} | ({"reason": reason} if reason else {})}


def as_api_error(error: Exception) -> ApiError:
    """What `error` is to a client; anything unexpected is a 500 that names only its type."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return ApiError(400, str(error), param=error.param or "input_tokens", reason="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.param, reason=error.code)
        case EngineDead():
            return ApiError(503, f"EngineDead: {error}", reason="engine_dead")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return ApiError(500, f"internal error: {type(error).__name__}")


def error_response(error: Exception) -> JsonResponse:
    """The reply for `error`."""
    known = as_api_error(error)
    body = error_body(known.status_code, str(known.detail), known.param, known.reason)
    return JsonResponse(body, status_code=known.status_code, headers=dict(known.headers or {}))


def install(app: FastAPI) -> None:
    """Make every deliberate exception of `app`'s routes answer with an OpenAI body."""

    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_describe(error))

    app.add_exception_handler(RequestValidationError, on_invalid)
    for kind in (HTTPException, RequestError, EngineDead):
        app.add_exception_handler(kind, on_error)


def _describe(error: RequestValidationError) -> ApiError:
    """FastAPI's list of problems as one 400 message that quotes no more than a line of the body."""
    problems = []
    first: str | None = None
    for problem in error.errors()[:_MAX_PROBLEMS]:
        place = ".".join(str(part) for part in problem.get("loc", ())[1:] if not _is_union_branch(part))
        message = str(problem.get("msg", "invalid")).removeprefix("Value error, ")
        problems.append(f"{place}: {message}"[:_MAX_PROBLEM_CHARS] if place else message[:_MAX_PROBLEM_CHARS])
        first = first or (place.split(".")[0] or None)
    return ApiError(400, "; ".join(dict.fromkeys(problems)), param=first)


def _is_union_branch(part: Any) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("int", "str", "float", "bool", "none"))
