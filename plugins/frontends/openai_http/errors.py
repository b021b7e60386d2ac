"""Every failure in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` (design: one body for HTTP and SSE).

| raised | status | type | code |
|---|---|---|---|
| RequestError | its own 4xx, or a 503 | invalid_request_error, or server_error | its own |
| OverloadedError | 503 + Retry-After | server_error | overloaded |
| ShuttingDownError | 503 + Retry-After | server_error | shutting_down |
| EngineDeadError | 503 | server_error | engine_dead |
| GenerationError, the request's own doing | 400 | invalid_request_error | no_token_left |
| GenerationError | 500, this request alone | server_error | generation_failed |
| anything else | 500 | server_error | internal_error |

Texts of 5xx are fixed: what a plugin or the engine said goes to the log only. Where a component is to blame, its name,
plugin and wheel are told: the client's operator needs them, and `GET /plugins` says no less.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from core.errors import (
    MAX_SHOWN,
    EngineDeadError,
    GenerationError,
    NonetError,
    OverloadedError,
    RequestError,
    near_matches,
    printable,
)

log = logging.getLogger("nonet.http")

REQUEST_ID = "nonet.request_id"  # key in the ASGI scope


class ShuttingDownError(NonetError):
    """The server drains: no new work, and running work ends at the drain limit."""


class ClientGoneError(NonetError):
    """The client closed its connection; nobody is there to be told."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, status=self.status, headers=self.headers)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode with msgspec: it cannot write NaN or Infinity (they would become null)."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _server_error(status: int, code: str, message: str, retry_after: float | None = None) -> Failure:
    headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
    return Failure(status, message, "server_error", code=code, headers=headers)


def failure_of(error: BaseException, request: str = "?") -> Failure:
    """The table above. `request`: whose failure it is, for the log (`request_text`)."""
    match error:
        case RequestError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return Failure(error.status, _with_field(error), kind, param=error.param, code=error.code)
        case OverloadedError():
            return _server_error(503, "overloaded", error.message, error.retry_after)
        case ShuttingDownError():
            return _server_error(503, "shutting_down", "The server is shutting down.", 1)
        case EngineDeadError():
            log.error("request %s: engine is not available: %r", request, str(error))
            return _server_error(503, "engine_dead", "The engine is not available.")
        case GenerationError(conflict=str(reason)):
            return Failure(400, f"{reason[0].upper()}{reason[1:]}.", code="no_token_left")
        case GenerationError():
            log.error("request %s failed: %r", request, str(error))  # quoted: no line breaks in the log
            who = "The engine" if error.part is None else f"The plugin {error.part}"
            return _server_error(500, "generation_failed", f"{who} failed while it ran this request.")
        case HTTPException():
            return Failure(error.status_code, error.detail, code=_http_code(error.status_code))
    log.error("request %s: unexpected %s", request, type(error).__name__, exc_info=error)
    return _server_error(500, "internal_error", "Internal server error.")


def _with_field(error: RequestError) -> str:
    """A message that begins with its field has it in quotes, whoever wrote it."""
    start = f"{error.param}: "
    return f"`{error.param}`: {error.message.removeprefix(start)}" if error.message.startswith(start) else error.message


def _http_code(status: int) -> str:
    return {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")


def _with_next_step(error: HTTPException, request: Request) -> str:
    path = printable(request.url.path, MAX_SHOWN)
    if error.status_code == 404:
        known = {route.path for route in request.app.routes if isinstance(route, Route)}
        return f"There is no {path}{near_matches(path, known)}"
    if error.status_code == 405:
        return f"{path} does not take {request.method}: use {(error.headers or {}).get('Allow', 'another method')}."
    return error.detail


def request_text(scope: Scope, answer_id: str = "") -> str:
    """Both names of a request, as in the answer: its header X-Request-Id, and its body's `id`."""
    name = str(scope.get(REQUEST_ID, "?"))
    return f"{name} ({answer_id})" if answer_id else name


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    if isinstance(error, HTTPException):
        error.detail = _with_next_step(error, request)
    response = failure_of(error, request_text(request.scope)).response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
