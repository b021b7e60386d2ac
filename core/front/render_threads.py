"""Threads for stage 2. A render that is stuck keeps its thread, and nothing else: others get a new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from core.errors import EngineDeadError, OverloadedError, described
from core.isolation.front import FrontLimits

T = TypeVar("T")

MAX_THREADS = 64  # stuck ones included
PATIENCE_S = 1.0  # a render that takes longer does not count against the limit of those that run at once


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    done: asyncio.Future[_Outcome]
    has_place: bool = True
    timers: tuple[asyncio.TimerHandle, ...] = ()


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class RenderThreads:
    """Runs up to `num_threads` renders at once, those not counted that have taken longer than `PATIENCE_S`.

    The limits count from when a render gets its thread.

    The threads are daemons: the end of the process does not wait for one that is stuck. Used on one event loop.
    """

    def __init__(self, num_threads: int, limits: FrontLimits):
        self._num_threads = num_threads
        self._limits = limits
        self._places = asyncio.Semaphore(num_threads)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._num_busy = 0
        self._num_idle = 0
        self._closed = False

    async def run(self, work: Callable[[], T], on_block: Callable[[float], None]) -> T:
        """What `work` returns or raises. `on_block` is called once, when it has taken `block_timeout` seconds.

        Raises TimeoutError after `render_timeout`, OverloadedError where too many are stuck already, or the system has no
        thread for one more. A caller that is cancelled leaves its render to run on, and counted.
        """
        await self._places.acquire()
        if self._closed or self._num_busy >= MAX_THREADS:
            self._places.release()
            if self._closed:
                raise EngineDeadError("the server is shutting down")
            raise OverloadedError(
                f"{self._num_busy} prompts are being rendered, and none of them ends; try again later"
            )
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        self._start(job)
        job.timers = (
            loop.call_later(PATIENCE_S, self._give_place, job),
            loop.call_later(self._limits.block_timeout, on_block, self._limits.block_timeout),
        )
        await asyncio.wait([job.done], timeout=self._limits.render_timeout)
        if not job.done.done():
            raise TimeoutError
        outcome = job.done.result()
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.value)

    def close(self) -> None:
        """Idle threads end at once, others after their render."""
        self._closed = True
        for _ in range(self._num_idle + self._num_busy):
            self._jobs.put(None)

    def _start(self, job: _Job) -> None:
        if self._num_idle:
            self._num_idle -= 1
        else:
            loop = asyncio.get_running_loop()
            try:
                threading.Thread(target=self._serve, args=(loop,), name="renderer", daemon=True).start()
            except RuntimeError as error:
                self._give_place(job)
                raise OverloadedError(f"a prompt cannot be rendered: {described(error)}; try again later") from None
        self._num_busy += 1
        self._jobs.put(job)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = _run(job)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._end, job, outcome)
            del job, outcome  # what a client sent is not kept by an idle thread

    def _end(self, job: _Job, outcome: _Outcome) -> None:
        self._num_busy -= 1
        self._give_place(job)
        for timer in job.timers:
            timer.cancel()
        job.done.set_result(outcome)
        if self._closed:
            return
        if self._num_idle < self._num_threads:
            self._num_idle += 1
        else:
            self._jobs.put(None)  # one thread too many: it was started in place of a stuck one

    def _give_place(self, job: _Job) -> None:
        if job.has_place:
            job.has_place = False
            self._places.release()


def _run(job: _Job) -> _Outcome:
    try:
        return _Outcome(job.work())
    except Exception as error:
        return _Outcome(error=error)
    except BaseException as error:  # it would end this thread, or the event loop where it is raised again
        return _Outcome(error=RuntimeError(f"{type(error).__name__} in a worker thread"))
