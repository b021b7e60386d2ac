"""The outermost middleware: request id, request metrics, and the last net under every exception."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plugins.frontends.openai_http.errors import REQUEST_ID, failure_of, request_text
from plugins.frontends.openai_http.limits import header_values

RECEIVED = "nonet.received"  # key in the ASGI scope: monotonic seconds, when the headers had come
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(scope: Scope) -> str:
    """The client's X-Request-Id, reduced to safe characters and 128 of them, or a new one."""
    values = header_values(scope, b"x-request-id")
    safe = _UNSAFE.sub("", values[0].decode("latin-1"))[:128] if values else ""
    return safe or uuid.uuid4().hex


def trace_context(scope: Scope) -> str:
    """The client's W3C traceparent; empty where it sent none, or another thing."""
    values = header_values(scope, b"traceparent")
    value = values[0].decode("latin-1") if len(values) == 1 else ""
    return value if _TRACE_PARENT.fullmatch(value) else ""


class Envelope:
    """Calls `observe(method, path, status, seconds)` for each answered request."""

    def __init__(self, app: ASGIApp, routes: frozenset[str], observe: Callable[[str, str, int, float], None]):
        self._app = app
        self._routes = routes
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = scope[RECEIVED] = time.monotonic()
        scope[REQUEST_ID] = request_id(scope)
        answer = Answered(scope[REQUEST_ID], send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.status is not None:  # part of an answer is out: only closing the connection is left
                raise
            await failure_of(error, request_text(scope)).response()(scope, receive, answer.send)
        if answer.status is not None:
            route = get_route_path(scope)
            path = route if route in self._routes else "other"
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "OPTIONS") else "other"
            self._observe(method, path, answer.status, time.monotonic() - started)


class Answered:
    """`send` that adds X-Request-Id and remembers the status."""

    def __init__(self, request_id: str, send: Send):
        self._id = request_id.encode("ascii")
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self._id)]}
        await self._send(message)
