"""A whole pipeline of this process behind its HTTP frontend: what a client of `serve` sees, without a second process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from core.assembly import build_frontend
from core.session import frontend_context
from core.testing.harness.frontend_thread import NetworkFrontend, serving
from core.testing.harness.pipelines import RunningPipeline, running


class ServedPipeline:
    """A `core.testing.harness.frontend_thread.NetworkFrontend`: `with serving(ServedPipeline("model.source=…")) as url`.

    `running` checks at the end that everything requests held is back.
    """

    def __init__(self, *overrides: str):
        self._overrides = ("frontend=openai_http", "frontend.port=0", *overrides)
        self._frontend: NetworkFrontend | None = None
        self._pipeline: RunningPipeline | None = None

    @property
    def url(self) -> str | None:
        return None if self._frontend is None else self._frontend.url

    @property
    def pipeline(self) -> RunningPipeline:
        """Lives on the server's event loop: read its numbers, call nothing that awaits."""
        assert self._pipeline is not None, "the pipeline has not started"
        return self._pipeline

    async def run(self) -> None:
        async with running(*self._overrides) as pipeline:
            context = frontend_context(pipeline.session, pipeline.front)
            frontend = cast(NetworkFrontend, build_frontend(pipeline.session.description, context))
            self._pipeline, self._frontend = pipeline, frontend
            await frontend.run()

    def stop(self) -> None:
        if self._frontend is not None:
            self._frontend.stop()


@dataclass(frozen=True)
class Served:
    """A served pipeline and calls to it, each of which says what it expects."""

    frontend: NetworkFrontend
    url: str
    timeout: float = 60.0  # seconds

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=self.timeout)

    def good(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer of a 200."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return strict_json(answer.text)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, [DONE] left out."""
        answer = self.post(path, {"stream": True, **body})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [strict_json(line) for line in lines[:-1]]

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a plain 400."""
        answer = self.post(path, body)
        assert answer.status_code == 400, (list(body), answer.text)
        assert answer.headers["content-type"] == "application/json"
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=self.timeout, limits=limits)


def strict_json(text: str) -> dict[str, Any]:
    """AssertionError for NaN and Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in the answer")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


@contextmanager
def served(frontend: NetworkFrontend) -> Iterator[Served]:
    with serving(frontend) as url:
        yield Served(frontend, url)


@contextmanager
def served_tiny(folder: Path, *overrides: str) -> Iterator[Served]:
    """A tiny model's folder behind HTTP, in float32 on one thread."""
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=256")
    with served(ServedPipeline(*fixed, *overrides)) as server:
        yield server
