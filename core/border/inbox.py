"""The way out of a client's thread: step outputs and deaths, in order and bounded, for coroutines to receive."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from core.errors import EngineDeadError
from core.outputs import StepOutput


class Inbox:
    """Step outputs and deaths in the order they happened, from one thread to any number of receiving coroutines."""

    def __init__(self, capacity: int, on_space: Callable[[], None]) -> None:
        self._capacity = capacity
        self._on_space = on_space
        self._lock = threading.Lock()
        self._items: deque[StepOutput | EngineDeadError] = deque()
        self._waiters: set[asyncio.Future[None]] = set()
        self._deaths = 0
        self._last_death = ""
        self._end: str | None = None

    @property
    def full(self) -> bool:
        return len(self._items) >= self._capacity

    @property
    def holds_death(self) -> bool:
        """A death is in the queue that no receiver has seen yet."""
        with self._lock:
            return any(isinstance(item, EngineDeadError) for item in self._items)

    def put(self, item: StepOutput | EngineDeadError) -> None:
        with self._lock:
            self._items.append(item)
            if isinstance(item, EngineDeadError):
                self._deaths += 1
                self._last_death = str(item)
            self._wake()

    def end(self, reason: str) -> None:
        """From now on every receiver gets what is queued, then EngineDeadError, for ever."""
        with self._lock:
            self._end = reason
            self._wake()

    async def get(self) -> StepOutput:
        """The next output. A death raises in whoever takes it and in everyone who waits at that moment."""
        seen = self._deaths
        while True:
            with self._lock:
                if self._items:
                    return self._take()
                if self._deaths > seen:
                    raise EngineDeadError(self._last_death)
                if self._end is not None:
                    raise EngineDeadError(self._end)
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.add(waiter)
            try:
                await waiter
            finally:
                with self._lock:
                    self._waiters.discard(waiter)

    def _take(self) -> StepOutput:
        was_full = self.full
        item = self._items.popleft()
        if was_full:
            self._on_space()
        if isinstance(item, EngineDeadError):
            raise item
        return item

    def _wake(self) -> None:
        for waiter in self._waiters:
            with suppress(RuntimeError):  # its event loop is closed
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
