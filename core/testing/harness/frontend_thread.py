"""Run a network frontend in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class NetworkFrontend(Protocol):
    """A frontend with an address. `url` is None until it listens."""

    @property
    def url(self) -> str | None: ...

    async def run(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def serving(frontend: NetworkFrontend) -> Iterator[str]:
    """Yields the URL. At the end the frontend is stopped, and must return within ten seconds. Re-raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(frontend.run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="frontend", daemon=True)
    thread.start()
    try:
        wait_until(lambda: frontend.url is not None or bool(errors))
        if errors:
            raise errors[0]
        assert frontend.url is not None
        yield frontend.url
    finally:
        frontend.stop()
        frontend.stop()
        thread.join(10.0)
        assert not thread.is_alive(), "the frontend did not stop"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll; AssertionError when `condition` is not met in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.005)
