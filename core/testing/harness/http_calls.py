"""What a client of the HTTP frontend saw of one call, written down so that ends can be counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from core.testing.harness.server import RunningServer, metric

T = TypeVar("T")
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Outcome:
    """One call with one choice. A `broken` call's connection ended before its answer did."""

    status: int = 0  # 0: no answer
    id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0  # [DONE] events of a stream
    num_objects: int = 0  # events of a stream that are no error
    broken: str = ""

    @property
    def complete(self) -> bool:
        return self.status == 200 and len(self.finish_reasons) == 1 and not self.errors and not self.broken

    @property
    def failed(self) -> bool:
        """Ended by exactly one error in OpenAI's shape, and nothing after it."""
        shape = {"message", "type", "param", "code"}
        told = len(self.errors) == 1 and set(self.errors[0]) == shape
        return told and not self.finish_reasons and not self.num_done and not self.broken

    @property
    def code(self) -> str:
        return str(self.errors[0]["code"]) if self.errors else ""


async def call(
    client: httpx.AsyncClient, body: dict[str, Any], outcome: Outcome | None = None, path: str = COMPLETIONS
) -> Outcome:
    """Send `body` and read the answer to its end. `outcome` fills while a stream comes; never raises an HTTP error."""
    outcome = outcome if outcome is not None else Outcome()
    try:
        async with client.stream("POST", path, json=body) as answer:
            outcome.status = answer.status_code
            if answer.headers["content-type"].startswith("text/event-stream"):
                async for line in answer.aiter_lines():
                    take_line(outcome, line)
            else:
                _take_whole(outcome, json.loads(await answer.aread()))
    except httpx.HTTPError as error:
        outcome.broken = repr(error)
    return outcome


def take_line(outcome: Outcome, line: str) -> None:
    """Take in one line of an event stream."""
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        outcome.num_done += 1
        return
    event = json.loads(data)
    if "error" in event:
        outcome.errors.append(event["error"])
        return
    outcome.num_objects += 1
    _take_choices(outcome, event)


def _take_whole(outcome: Outcome, body: dict[str, Any]) -> None:
    if "error" in body:
        outcome.errors.append(body["error"])
    else:
        _take_choices(outcome, body)


def _take_choices(outcome: Outcome, body: dict[str, Any]) -> None:
    outcome.id = body["id"]
    outcome.usage = body.get("usage") or outcome.usage
    for choice in body["choices"]:
        outcome.text += choice["text"]
        outcome.token_ids += choice.get("token_ids") or []
        if choice["finish_reason"] is not None:
            outcome.finish_reasons.append(choice["finish_reason"])


def completion_body(prompt: str | Sequence[int], max_tokens: int, **values: Any) -> dict[str, Any]:
    """Greedy, through EOS, with token ids, unless `values` say otherwise."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens, **fixed, **values}


@asynccontextmanager
async def connected(server: RunningServer, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client with as many connections as it has calls. It drops an idle one before the server does (idle_seconds=5)."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=120, limits=limits, **options) as client:
        yield client


async def bounded(jobs: Sequence[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
    """Run coroutines, so many at a time; results in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(job: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await job

    return await asyncio.gather(*map(one, jobs))


async def idle_metrics(client: httpx.AsyncClient, seconds: float = 30.0) -> str:
    """Waits until nothing runs, waits or holds a block; returns the text of /metrics. AssertionError when it does not."""
    deadline = time.monotonic() + seconds
    while True:
        text = (await client.get("/metrics")).text
        gauges = [metric(text, f"nonet_requests_{name}") for name in ("running", "waiting", "in_flight")]
        held = metric(text, "nonet_kv_blocks_total") - metric(text, "nonet_kv_blocks_free")
        if not any(gauges) and not held:
            return text
        assert time.monotonic() < deadline, f"running, waiting, in flight {gauges}; blocks held: {held}"
        await asyncio.sleep(0.05)
