"""HTTP/1.1 on h11, with what uvicorn leaves open: a time limit for headers, a cap on connections, JSON error bodies."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from plugins.frontends.openai_http.errors import Failure
from plugins.frontends.openai_http.limits import refuse
from plugins.frontends.openai_http.settings import Limits
from plugins.frontends.openai_http.sse import ABORT_CONNECTION

PIPELINED_BYTES = 64 << 10

_FULL = Failure(
    503, "The server has too many connections.", "server_error", code="overloaded", headers={"retry-after": "1"}
)


async def answer_full(scope: Scope, receive: Receive, send: Send) -> None:
    await refuse(_FULL, scope, receive, send)


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration and our limits, where the protocol finds them."""

    def __init__(self, app: Any, limits: Limits, **options: Any):
        super().__init__(app, **options)
        self.limits = limits


class Http11(H11Protocol):
    """One connection."""

    def __init__(self, config: HttpConfig, server_state: ServerState, app_state: dict[str, Any], **options: Any):
        super().__init__(config, server_state, app_state, **options)
        self._limits = config.limits
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT_CONNECTION: transport.abort}
        if len(self.connections) > 2 * self._limits.connections:
            transport.abort()
        elif len(self.connections) > self._limits.connections:
            self.app = answer_full
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._idle and self._header_timer is None:
            self._start_header_timer()
        super().data_received(data)
        if not self._idle:
            self._stop_header_timer()
            self._listen_on()

    def send_400_response(self, msg: str) -> None:
        """What h11 refused. It runs while the exception is handled, which tells 431 from 400."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        if status == 431:
            failure = Failure(431, "The request headers are too large.", code="headers_too_large")
        else:
            failure = Failure(400, "The request is not valid HTTP/1.1.", code="bad_request")
        self._send_failure(failure)

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _listen_on(self) -> None:
        """uvicorn stops reading when a pipelined request waits, and would then miss the disconnect; read a little on."""
        if self.cycle is not None and not self.cycle.more_body and self.flow.read_paused:
            waiting, _closed = self.conn.trailing_data
            if len(waiting) < PIPELINED_BYTES:
                self.flow.resume_reading()

    def _send_failure(self, failure: Failure) -> None:
        response = failure.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        reason = b"Bad Request" if failure.status == 400 else b"Request Header Fields Too Large"
        for event in (
            h11.Response(status_code=failure.status, headers=headers, reason=reason),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_seconds, self._headers_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._idle:
            self.transport.close()
