"""What one request may send: header count and size, body size while it is read, time for the body (bugs P5, P6)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plugins.frontends.openai_http.errors import Failure
from plugins.frontends.openai_http.settings import Limits

LINGER_BYTES = 64 << 10
LINGER_SECONDS = 1.0


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def has_body(scope: Scope) -> bool:
    lengths = header_values(scope, b"content-length")
    return bool(header_values(scope, b"transfer-encoding")) or any(value.strip(b"0 ") for value in lengths)


async def refuse(failure: Failure, scope: Scope, receive: Receive, send: Send, linger: int = LINGER_BYTES) -> None:
    """Answer before the body was read, then close.

    The connection lingers while the client writes at most `linger` bytes more: closing on unread data resets the
    connection, and the client would lose the answer.
    """
    response = failure.response()
    if not has_body(scope):
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": failure.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _discard(receive, linger)
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive, budget: int) -> None:
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while budget > 0:
                message = await receive()
                budget -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class HeaderGuard(ABC):
    """ASGI middleware that judges a request by its head alone, before any of the body is read."""

    def __init__(self, app: ASGIApp):
        self._app = app

    @abstractmethod
    def _failure(self, scope: Scope) -> Failure | None:
        """Why the request is refused; None lets it pass."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._failure(scope)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await refuse(failure, scope, receive, send)


class HeaderLimits(HeaderGuard):
    """ASGI middleware: header count and bytes (431), one way to frame a body (400), no content coding (415)."""

    def __init__(self, app: ASGIApp, limits: Limits):
        super().__init__(app)
        self._limits = limits

    def _failure(self, scope: Scope) -> Failure | None:
        headers = scope["headers"]
        if scope["http_version"] not in ("1.0", "1.1"):
            return Failure(400, "Only HTTP/1.0 and HTTP/1.1 are served.", code="bad_request")
        num_bytes = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope["raw_path"])
        if len(headers) > self._limits.headers or num_bytes + len(scope["query_string"]) > self._limits.header_bytes:
            return Failure(431, "The request headers are too large.", code="headers_too_large")
        lengths = header_values(scope, b"content-length")
        if len(lengths) > 1 or (lengths and header_values(scope, b"transfer-encoding")):
            return Failure(400, "Content-Length may appear once, and not with Transfer-Encoding.", code="bad_framing")
        codings = header_values(scope, b"content-encoding")
        if any(coding.strip().lower() not in (b"", b"identity") for coding in codings):
            return Failure(415, "Content-Encoding is not supported: send the body as it is.", code="bad_encoding")
        return None


class BodyTooLargeError(Exception):
    """Counted while reading, or declared."""


class BodyLimit:
    """ASGI middleware: reads the whole body, counted while it comes (413) and timed (408), then replays it once.

    Later calls of `receive` reach the server, so that a disconnect is seen.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read(scope, receive)
        except BodyTooLargeError:
            text = f"The body is larger than {self._limits.body_bytes} bytes."
            await refuse(Failure(413, text, code="body_too_large"), scope, receive, send)
            return
        except TimeoutError:
            text = f"The body did not arrive within {self._limits.body_seconds:g} s."
            await refuse(Failure(408, text, code="body_timeout"), scope, receive, send, linger=0)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None: the client went away."""
        declared = header_values(scope, b"content-length")
        if declared and int(declared[0]) > self._limits.body_bytes:
            raise BodyTooLargeError
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.body_bytes:
                raise BodyTooLargeError
            if not message.get("more_body", False):
                return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
