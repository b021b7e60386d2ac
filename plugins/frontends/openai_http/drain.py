"""Shutdown (reliability R8).

| event | /health | new work | running work |
|---|---|---|---|
| first SIGTERM or SIGINT | 503 `draining` at once | 503 `shutting_down` | goes on up to `drain_timeout` seconds |
| the last call ended, or the limit passed | - | - | an error event (or a 503 body) each, then the server exits |
| second signal | - | - | as at the limit, at once; open connections are cut, exit under 2 s |

With the default `drain_timeout` of 0 the limit passes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from plugins.frontends.openai_http.errors import ShuttingDownError


class Stoppable(Protocol):
    def stop(self, error: Exception) -> None: ...


class Drain:
    """Knows the running calls and when they must end. `signal` may run inside a signal handler."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic):
        self._timeout = timeout
        self._clock = clock
        self._deadline: float | None = None
        self._calls: set[Stoppable] = set()
        self.signals = 0

    @property
    def draining(self) -> bool:
        return self.signals > 0

    def add(self, call: Stoppable) -> None:
        """Raises ShuttingDownError once a signal came."""
        if self.draining:
            raise ShuttingDownError
        self._calls.add(call)

    def remove(self, call: Stoppable) -> None:
        self._calls.discard(call)

    def signal(self) -> None:
        self.signals += 1
        if self._deadline is None:
            self._deadline = self._clock() + self._timeout
        else:
            self._deadline = self._clock()

    def expired(self) -> bool:
        """Whether the server must exit now. Calls still running are stopped when this turns true."""
        if self._deadline is None:
            return False
        if self._calls and self._clock() < self._deadline:
            return False
        for call in list(self._calls):
            call.stop(ShuttingDownError())
        return True
