"""Sending an answer: one JSON body, or server-sent events.

- Headers of a stream wait for the first delta, so that every refusal is a plain HTTP error (bugs D1, D4, N8). After
  `keep_alive_seconds` without one they go out with a comment, and comments follow while nothing is produced (D5).
- An error inside a stream is exactly one `data: {"error": …}` event and the end of the response. No `[DONE]` follows:
  it would tell a client that the answer is complete (D2, D3).
- A client that leaves, or reads nothing for `write_seconds`, aborts the call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from plugins.frontends.openai_http.answer import Shape
from plugins.frontends.openai_http.calls import Call
from plugins.frontends.openai_http.errors import ClientGoneError, failure_of, json_response, request_text

log = logging.getLogger("nonet.http")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
ABORT_CONNECTION = "nonet_abort"  # in scope["state"], put there by `protocol.Http11`


def event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is delivered. Times in seconds."""

    stream: bool
    include_usage: bool = False
    keep_alive_seconds: float = 10.0
    write_seconds: float = 60.0


class AnswerResponse(Response):
    """Runs the call while it is sent, and watches for the client's disconnect all the time."""

    def __init__(self, call: Call, shape: Shape, delivery: Delivery, spent: Callable[[float], None]):
        """`spent` is told once how many seconds writing the answer's bytes took, sending them not counted."""
        super().__init__()
        self._call = call
        self._shape = shape
        self._delivery = delivery
        self._spent = spent
        self._write_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._call:
            watch = asyncio.create_task(self._watch(receive))
            deliver = self._send_stream if self._delivery.stream else self._send_whole
            try:
                await deliver(scope, receive, send)
            except ClientGoneError:
                log.info("client left; request aborted")
            finally:
                watch.cancel()
                self._spent(self._write_s)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.stop(ClientGoneError())

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = self._shape.collected()
        try:
            while (delta := await self._call.next()) is not None:
                started = time.perf_counter()
                collected.add(delta)
                self._write_s += time.perf_counter() - started
            started = time.perf_counter()
            response = json_response(self._shape.whole(collected, self._call.usage))
            self._write_s += time.perf_counter() - started
        except ClientGoneError:
            raise
        except Exception as error:
            response = failure_of(error, request_text(scope, self._shape.head.id)).response()
        await self._write(scope, lambda: response(scope, receive, send))

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for data in self._events():
                if not started:
                    started = True
                    await self._send(scope, send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._send(scope, send, _part(data))
        except ClientGoneError:
            raise
        except Exception as error:
            failure = failure_of(error, request_text(scope, self._shape.head.id))
            if not started:
                await failure.response()(scope, receive, send)
                return
            await self._send(scope, send, _part(event(failure.body)))
        await self._send(scope, send, {"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        while True:
            try:
                delta = await self._call.next(self._delivery.keep_alive_seconds)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if delta is None:
                break
            started = time.perf_counter()
            data = b"".join(event(chunk) for chunk in self._shape.chunks(delta))
            self._write_s += time.perf_counter() - started
            if data:
                yield data
        if self._delivery.include_usage:
            yield event(self._shape.usage_chunk(self._call.usage))
        yield DONE

    async def _send(self, scope: Scope, send: Send, message: Message) -> None:
        await self._write(scope, lambda: send(message))

    async def _write(self, scope: Scope, write: Callable[[], Awaitable[None]]) -> None:
        """Raises ClientGoneError when the client takes nothing for `write_seconds`."""
        try:
            async with asyncio.timeout(self._delivery.write_seconds):
                await write()
        except TimeoutError:
            abort = scope.get("state", {}).get(ABORT_CONNECTION)
            if abort is not None:
                abort()
            raise ClientGoneError from None
