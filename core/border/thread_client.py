"""What both engine clients share: one thread beside the event loop, an outbox into it, a bounded inbox out of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from core.border.inbox import Inbox
from core.errors import EngineDeadError, NonetError, OverloadedError, described
from core.model.roofline import Roofline
from core.outputs import StepOutput
from core.progress import Progress, no_progress
from core.request import EngineRequest
from core.wire import Abort, EngineInfo, FrontMessage, MeasureRoofline, Reply, ResetPrefixCache, Shutdown

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

INBOX_STEPS = 64  # step outputs that wait for the event loop before the engine is held up
TURN_S = 0.1  # the longest sleep of a client's thread
OUTBOX_ITEMS = 1024  # messages that wait for the engine before new requests are refused


class EngineStatus(StrEnum):
    STARTING = "starting"
    OK = "ok"
    FROZEN = "frozen"
    DEAD = "dead"  # for good: nothing will restart it
    CLOSED = "closed"


class EngineHealth(NamedTuple):
    status: EngineStatus
    step_age: float  # seconds since the step loop last showed itself; 0 while it is not running
    detail: str


class ThreadClient(ABC, Generic[Item]):
    """An `EngineClient` whose work is `_run`, in a thread of its own. `Item` is what the outbox holds."""

    def __init__(self, probe_timeout: float, close_timeout: float) -> None:
        self._probe_timeout = probe_timeout
        self._close_timeout = close_timeout
        self._inbox = Inbox(INBOX_STEPS, self._wake)
        self._lock = threading.Lock()  # of the fields below, where two threads write
        self._outbox: deque[Item] = deque()
        self._replies: dict[int, Future[Reply]] = {}
        self._status = EngineStatus.STARTING
        self._closing = False  # the user asked for the end
        self._calls = itertools.count(1)
        self._info: EngineInfo | None = None
        self._detail = "not started"
        self._generation = 0
        self._last_seen = 0.0  # monotonic seconds of the step loop's last sign of life
        self._started: Future[None] = _running_future()
        self._ended: Future[None] = _running_future()
        self._progress: Progress = no_progress
        self._thread = threading.Thread(target=self._run_thread, name="engine-client", daemon=True)

    @abstractmethod
    def _run(self) -> str:
        """The thread's work, until the engine is gone for good; returns why."""

    @abstractmethod
    def _pack(self, message: FrontMessage) -> Item: ...

    @abstractmethod
    def _pack_add(self, requests: Sequence[EngineRequest]) -> list[Item]:
        """Raises RequestError for a request that cannot cross; then none of them does."""

    @abstractmethod
    def _wake(self) -> None:
        """Let the thread look at its outbox and inbox; callable from any thread."""

    @abstractmethod
    def kill(self) -> None:
        """End at once what can be ended, from any thread; pending receivers get EngineDeadError."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def generation(self) -> int:
        """Lives of the engine so far, this one included."""
        return self._generation

    async def start(self, progress: Progress | None = None) -> None:
        """Start the engine and wait for it; `progress` is called on this event loop. Raises the reason it failed."""
        if progress is not None:
            self._progress = _on_loop(asyncio.get_running_loop(), progress)
        self._thread.start()
        try:
            await asyncio.wrap_future(self._started)
        except asyncio.CancelledError:
            self.kill()
            raise
        except NonetError:
            await asyncio.wrap_future(self._ended)
            raise

    def send_add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests for the engine. Never blocks, from any thread.

        Raises RequestError (too large), OverloadedError (starting, too much queued), EngineDeadError (gone for good).
        """
        items = self._pack_add(requests)
        with self._lock:
            self._refuse_unless_ready()
            if len(self._outbox) >= OUTBOX_ITEMS:
                raise OverloadedError("the engine does not keep up with new requests; try again later")
            self._outbox.extend(items)
        self._wake()

    def send_abort(self, request_ids: Sequence[str]) -> None:
        """Queue aborts. Never blocks and never fails: an engine that is gone has no request left to abort."""
        item = self._pack(Abort(request_ids=list(request_ids)))
        with self._lock:
            if self._status is EngineStatus.OK:
                self._outbox.append(item)
        self._wake()

    async def receive(self) -> StepOutput:
        """The next step's output. EngineDeadError once for each death, and always when the engine is gone for good.

        After it no request sent before has an answer to come; when `health` says "starting", a new life follows.
        """
        return await self._inbox.get()

    async def reset_prefix_cache(self) -> bool:
        """True when the cache was emptied; False when blocks are in use. Raises EngineDeadError."""
        return (await self._ask(ResetPrefixCache(call_id=next(self._calls)))).ok

    async def measure_roofline(self) -> Roofline | None:
        """Takes seconds in which no step runs. None where the model or its executor tells none. Raises EngineDeadError."""
        return (await self._ask(MeasureRoofline(call_id=next(self._calls)))).roofline

    async def _ask(self, message: ResetPrefixCache | MeasureRoofline) -> Reply:
        reply = _running_future_of_reply()
        item = self._pack(message)
        with self._lock:
            self._refuse_unless_ready()
            self._replies[message.call_id] = reply
            self._outbox.append(item)
        self._wake()
        return await asyncio.wrap_future(reply)

    def health(self) -> EngineHealth:
        """Cheap, callable from any thread. "frozen": the step loop was silent for longer than the probe time-out."""
        status, age = self._status, 0.0
        if status is EngineStatus.OK and not self._inbox.full:  # a full inbox is the front's own delay
            age = max(0.0, time.monotonic() - self._last_seen)
        if age > self._probe_timeout:
            detail = f"no step and no heartbeat for {age:.1f} s"
            return EngineHealth(EngineStatus.FROZEN, age, detail)
        return EngineHealth(status, age, self._detail)

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, let the running ones end for up to `drain_s` seconds, end the engine. Idempotent.

        Keep receiving meanwhile. What is still there after `drain_s` and the close time-out is killed.
        """
        with self._lock:
            self._closing = True
            if self._status is EngineStatus.OK:
                self._outbox.append(self._pack(Shutdown(drain_s=drain_s)))
        if self._thread.ident is None:
            self._finish("the engine client is closed")
            return
        self._wake()
        ended = asyncio.wrap_future(self._ended)
        if not (await asyncio.wait([ended], timeout=drain_s + self._close_timeout))[0]:
            self.kill()
            await asyncio.wait([ended], timeout=self._close_timeout)

    def _refuse_unless_ready(self) -> None:
        if self._closing or self._status in (EngineStatus.DEAD, EngineStatus.CLOSED):
            raise EngineDeadError(self._detail if not self._closing else "the engine is shutting down")
        if self._status is not EngineStatus.OK or self._inbox.holds_death:
            raise OverloadedError("the engine is starting; try again later")
        if self.health().status is EngineStatus.FROZEN:
            raise OverloadedError("the engine does not answer; try again later")

    def _seen(self, loop_time: float) -> None:
        self._last_seen = max(self._last_seen, loop_time)

    def _on_ready(self, info: EngineInfo) -> None:
        with self._lock:
            self._info = info
            self._last_seen = time.monotonic()
            self._status = EngineStatus.OK
            self._detail = ""
            if self._closing:  # asked for while it started
                self._outbox.append(self._pack(Shutdown()))
        if not self._started.done():
            self._started.set_result(None)

    def _on_progress(self, what: str, done: int, total: int) -> None:
        self._detail = f"{what} {done}/{total}"
        self._progress(what, done, total)

    def _on_reply(self, reply: Reply) -> None:
        with self._lock:
            waiting = self._replies.pop(reply.call_id, None)
        if waiting is not None:
            waiting.set_result(reply)

    def _fail_pending(self, status: EngineStatus, detail: str) -> None:
        """The engine is gone: forget what was meant for it, and tell everyone who waits for an answer."""
        with self._lock:
            self._status = status
            self._detail = detail
            self._outbox.clear()
            replies = list(self._replies.values())
            self._replies.clear()
        for reply in replies:
            reply.set_exception(EngineDeadError(detail))

    def _run_thread(self) -> None:
        try:
            reason = self._run()
        except NonetError as error:  # the first start failed
            self._finish(str(error))
            self._started.set_exception(error)
        except BaseException as error:  # whatever ends this thread: nobody else would tell those who wait
            logger.exception("the engine client failed")
            reason = f"the engine client failed: {described(error)}"
            self._finish(reason)
            if not self._started.done():
                self._started.set_exception(EngineDeadError(reason))
        else:
            self._finish(reason)
            if not self._started.done():
                self._started.set_exception(EngineDeadError(reason))
        finally:
            self._ended.set_result(None)

    def _finish(self, reason: str) -> None:
        self._fail_pending(EngineStatus.CLOSED if self._closing else EngineStatus.DEAD, reason)
        self._inbox.end(reason)


def _running_future() -> Future[None]:
    """A future that cannot be cancelled: a caller who stops waiting must not stop the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _running_future_of_reply() -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_running_or_notify_cancel()
    return future


def _on_loop(loop: asyncio.AbstractEventLoop, progress: Progress) -> Progress:
    def call(what: str, done: int, total: int) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(progress, what, done, total)

    return call
