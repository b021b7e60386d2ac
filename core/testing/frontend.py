"""What every frontend must do, as tests::

    class TestMine(FrontendContract):
        component = Mine
        settings = {"port": 0}

        async def ask(self, frontend, prompt, max_tokens):  # the text of one answer, or an exception
            ...

How a frontend is spoken to is its own affair, so checks that need a client are skipped unless `ask` is given. One that
provides "openai" (POST /v1/completions at its `url`) has it here already.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from core.errors import GenerationError, RequestError
from core.pipeline import PipelineDescription
from core.stages.frontend import Frontend, FrontendContext, GenerateRequest
from core.testing.contract import Contract
from core.testing.fake_front import FakeFront, Script

START_S = 20.0
END_S = 5.0  # what a pipeline whose engine died gives a frontend that it cancels
HELD = "a call is not freed"
SETTLE_S = 0.2  # for a frontend that cannot say when it has started


class FrontendContract(Contract):
    @pytest.fixture(autouse=True)
    def _empty_stdin(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """For frontends that read it: it has ended."""
        with open(os.devnull, encoding="utf-8") as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            yield

    def make_frontend(self, front: FakeFront) -> Frontend:
        frontend: Frontend = self.make(FrontendContext(front, PipelineDescription(()), served_names=("fake-model",)))
        return frontend

    async def ask(self, frontend: Any, prompt: str, max_tokens: int) -> str:
        """One call of a client. Cancelled, the client goes away."""
        body = {"model": "fake-model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        events = await post(f"{frontend.url}/v1/completions", {**body, "stream": True})
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    @pytest.fixture
    def _client(self) -> None:
        """For checks that need `ask`."""
        if type(self).ask is FrontendContract.ask:
            self.needs("openai")

    @asynccontextmanager
    async def running(self, frontend: Frontend) -> AsyncIterator[asyncio.Task[None]]:
        """Ended by cancelling `run`, which must then return in time."""
        task = asyncio.ensure_future(frontend.run())
        try:
            await self._started(frontend, task)
            yield task
        finally:
            task.cancel()
            await self.assert_ends(task, "cancelled")

    async def _started(self, frontend: Any, task: asyncio.Task[None]) -> None:
        if hasattr(frontend, "url"):
            await until(lambda: frontend.url is not None or task.done(), START_S)
        else:
            await asyncio.wait({task}, timeout=SETTLE_S)
        if task.done():
            task.result()

    async def assert_ends(self, task: asyncio.Task[None], what: str) -> None:
        await asyncio.wait({task}, timeout=END_S)
        assert task.done(), f"run does not end within {END_S:g} s of being {what}"

    def test_building_it_starts_nothing(self) -> None:
        front, before = FakeFront(), set(threading.enumerate())
        assert self.make_frontend(front) is not self.make_frontend(front)
        assert not front.requests, "a request is made before `run`"
        assert set(threading.enumerate()) == before, "a thread is started before `run`"

    def test_run_ends_when_it_is_cancelled(self) -> None:
        async def check() -> None:
            async with self.running(self.make_frontend(FakeFront())):
                pass

        run_to_end(check())

    def test_run_ends_when_it_is_told_to_stop(self) -> None:
        async def check() -> None:
            frontend: Any = self.make_frontend(FakeFront())
            if not hasattr(frontend, "stop"):
                pytest.skip("it has no `stop`")
            async with self.running(frontend) as task:
                frontend.stop()
                frontend.stop()
                await self.assert_ends(task, "told to stop")

        run_to_end(check())

    def test_nothing_is_held_at_the_end(self) -> None:
        """Also what a frontend asks by itself, as one that answers a file does."""

        async def check() -> None:
            front = FakeFront(Script(delay=0.5))
            async with self.running(self.make_frontend(front)):
                pass
            await until(lambda: not front.open, END_S, HELD)

        run_to_end(check())

    @pytest.mark.usefixtures("_client")
    def test_an_answer_reaches_the_client(self) -> None:
        async def check(frontend: Frontend, front: FakeFront) -> None:
            assert (await self.ask(frontend, "the prompt", 20)).strip() == "hello world"
            (request,) = front.requests
            assert getattr(request.prompt, "text", None) == "the prompt"
            assert request.max_tokens == 20 and not front.open

        self._run(check, FakeFront(Script("hello world")))

    @pytest.mark.usefixtures("_client")
    def test_calls_at_once_have_their_own_answers(self) -> None:
        async def check(frontend: Frontend, front: FakeFront) -> None:
            texts = await asyncio.gather(*(self.ask(frontend, f"word{index}", 40) for index in range(8)))
            assert [text.strip() for text in texts] == [f"again word{index}" for index in range(8)]
            assert not front.open

        def script(request: GenerateRequest) -> Script:
            return Script(f"again {getattr(request.prompt, 'text', '')}", delay=0.002)

        self._run(check, FakeFront(script))

    @pytest.mark.usefixtures("_client")
    @pytest.mark.parametrize("error_at", [0, 2])
    def test_a_failed_call_fails_alone(self, error_at: int) -> None:
        """Refused at admission, or in the middle of its answer; the frontend serves on."""

        def script(request: GenerateRequest) -> Script:
            failure = GenerationError("the sampler failed") if error_at else RequestError("refused", param="prompt")
            bad = getattr(request.prompt, "text", "") == "bad"
            return Script("hello world and again", error=failure if bad else None, error_at=error_at)

        async def check(frontend: Frontend, front: FakeFront) -> None:
            try:
                told = await self.ask(frontend, "bad", 20)
            except Exception:
                told = ""
            assert "hello world and again" not in told, "the client of a failed call is told of success"
            assert (await self.ask(frontend, "good", 20)).strip() == "hello world and again"
            assert not front.open, "the failed call still holds something"

        self._run(check, FakeFront(script))

    @pytest.mark.usefixtures("_client")
    def test_a_client_that_goes_away_frees_what_it_held(self) -> None:
        async def check(frontend: Frontend, front: FakeFront) -> None:
            call = asyncio.ensure_future(self.ask(frontend, "the prompt", 500))
            await until(lambda: bool(front.open), START_S)
            await asyncio.sleep(0.1)
            call.cancel()
            await until(lambda: not front.open, END_S, HELD)
            assert len(front.aborted) == 1, "the answer went on without a client"

        self._run(check, FakeFront(Script(delay=0.05)))

    @pytest.mark.usefixtures("_client")
    def test_calls_in_flight_are_freed_when_it_ends(self) -> None:
        async def check() -> None:
            front = FakeFront(Script(delay=0.05))
            frontend = self.make_frontend(front)
            async with self.running(frontend):
                call = asyncio.ensure_future(self.ask(frontend, "the prompt", 500))
                await until(lambda: bool(front.open), START_S)
            await until(lambda: not front.open, END_S, HELD)
            await asyncio.gather(call, return_exceptions=True)

        run_to_end(check())

    def _run(self, check: Callable[[Frontend, FakeFront], Any], front: FakeFront) -> None:
        async def run() -> None:
            frontend = self.make_frontend(front)
            async with self.running(frontend):
                await check(frontend, front)

        run_to_end(run())


def run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Like asyncio.run, but what does not end when it is cancelled is left behind instead of waited for."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(coroutine)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def until(condition: Callable[[], bool], seconds: float, else_say: str = "it does not start") -> None:
    """AssertionError when `condition` is not met in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"{else_say} within {seconds:g} s"
        await asyncio.sleep(0.01)


async def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer. RuntimeError with what came instead; the connection is closed whatever happens."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        answer = (await reader.read(-1)).decode()
    finally:
        writer.close()
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    if " 200 " not in answer.partition("\r\n")[0] or "[DONE]" not in lines:
        raise RuntimeError(answer[-500:])
    return [json.loads(line) for line in lines if line != "[DONE]"]
