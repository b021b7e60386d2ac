"""How the front reaches the engine: the `EngineClient` contract, in this process or across the process border."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from core import errors
from core.border.child import EngineChild
from core.border.early import EarlyProcess
from core.border.inline_client import InlineClient
from core.border.step_loop import EngineLoop
from core.border.thread_client import TURN_S, EngineHealth, EngineStatus, ThreadClient
from core.errors import EngineDeadError, NonetError, RequestError
from core.model.roofline import Roofline
from core.outputs import StepOutput, TokenDelta
from core.progress import Progress
from core.request import EngineRequest, FinishReason
from core.version import nonet_version
from core.wire import (
    Add,
    AnyMessage,
    EngineInfo,
    FrameTooLargeError,
    FrontMessage,
    Heartbeat,
    Hello,
    Loading,
    Output,
    Ready,
    Reply,
    StartFailed,
    Stopped,
    WireError,
    encode,
)

__all__ = [
    "EngineClient",
    "EngineHealth",
    "EngineInfo",
    "EngineLoop",
    "EngineProcessSettings",
    "EngineStatus",
    "InlineClient",
    "ProcessClient",
]

logger = logging.getLogger(__name__)

ENGINE_FACTORY = "core.assembly:build_engine_from_json"
RESTART_DELAY_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # before the first, second … restart in a row
EXIT_GRACE_S = 1.0  # for a child that has said its last word


class EngineClient(Protocol):
    """The engine as the front sees it; the methods say more in `core.border.thread_client.ThreadClient`.

    Every request sent gets its final delta through `receive`, or `receive` raises EngineDeadError.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def generation(self) -> int: ...
    async def start(self, progress: Progress | None = None) -> None: ...
    def send_add(self, requests: Sequence[EngineRequest]) -> None: ...
    def send_abort(self, request_ids: Sequence[str]) -> None: ...
    async def receive(self) -> StepOutput: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def measure_roofline(self) -> Roofline | None: ...
    def health(self) -> EngineHealth: ...
    async def close(self, drain_s: float = 0.0) -> None: ...
    def kill(self) -> None: ...


class EngineProcessSettings(BaseModel):
    """How the engine process is started, watched and replaced. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_timeout: float = Field(default=600.0, gt=0, description="from the start of the process to Ready")
    probe_timeout: float = Field(default=10.0, gt=0, description="silence of the step loop that counts as frozen")
    freeze_timeout: float = Field(default=300.0, gt=0, description="silence after which a frozen engine is replaced")
    close_timeout: float = Field(default=2.0, gt=0, description="beyond the drain time, before the process is killed")
    on_engine_death: Literal["restart", "exit"] = "restart"
    max_restarts: int = Field(default=3, ge=0, description="in a row, without one request that ended well between")


class ProcessClient(ThreadClient[bytes]):
    """The engine in a process of its own, started again when it dies (`EngineProcessSettings.on_engine_death`).

    `settings_json` is what the engine process builds from. `plugins` is compared with what it loaded: PluginError from
    `start`. With "exit", or after `max_restarts`, the status is "dead" and the server is expected to end.
    The child lives as long as the client's thread: the kernel ends it with its parent thread. The first one may have been
    begun `early`, and then lives as long as the thread that did.
    """

    def __init__(
        self,
        settings_json: str,
        *,
        plugins: Sequence[str] | None = None,
        settings: EngineProcessSettings | None = None,
        early: EarlyProcess | None = None,
        _factory: str = ENGINE_FACTORY,
    ) -> None:
        self._settings = settings or EngineProcessSettings()
        self._hello = (settings_json, None if plugins is None else list(plugins))
        self._factory = _factory
        self._early = early
        self._child: EngineChild | None = None
        self._killed = False
        self._wake_read = self._wake_write = -1  # a pipe while the thread runs
        self._wake_lock = threading.Lock()
        self._dropped_before = 0  # frames dropped in earlier lives
        self._begin_life()
        super().__init__(self._settings.probe_timeout, self._settings.close_timeout)

    def _begin_life(self) -> None:
        self._end: NonetError | None = None  # what ended this life
        self._greeted = False
        self._served = False  # a request ended well
        self._next_sequence = 1
        self._parts: list[TokenDelta] = []  # of a step output whose last part has not come
        self.step = 0
        self.engine_dropped = 0

    @property
    def dropped(self) -> int:
        """Frames from strangers, or that were no message, since the start."""
        child = self._child
        return self._dropped_before + (child.dropped if child else 0)

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None between two lives."""
        child = self._child
        return child.pid if child else None

    def kill(self) -> None:
        self._killed = True
        child = self._child
        if child is not None:
            child.kill()
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock, suppress(OSError):  # full: it is awake already; -1: the thread does not run
            os.write(self._wake_write, b"w")

    def _pack(self, message: FrontMessage) -> bytes:
        return encode(message)

    def _pack_add(self, requests: Sequence[EngineRequest]) -> list[bytes]:
        try:
            return [encode(Add(requests=list(requests)))]
        except FrameTooLargeError:
            if len(requests) > 1:
                return [frame for request in requests for frame in self._pack_add([request])]
            raise RequestError(
                "the request is too large to cross to the engine; shorten the prompt",
                param="prompt",
                code="request_too_large",
                status=413,
            ) from None
        except WireError as error:
            raise RequestError(f"the request cannot cross to the engine: {error}") from error

    def _run(self) -> str:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: a child must not die of Ctrl-C
        self._wake_read, self._wake_write = _wake_pipe()
        try:
            return self._lives()
        finally:
            with self._wake_lock:
                os.close(self._wake_write)
                self._wake_write = -1
            os.close(self._wake_read)

    def _lives(self) -> str:
        """One life of the engine after the other; returns why there is no next. Raises why the first start failed."""
        failures = 0
        while True:
            error = self._live()
            if self._closing or self._killed:
                return "the engine client is closed"
            if not self._started.done():
                raise error
            failures = 1 if self._served else failures + 1
            if self._settings.on_engine_death == "exit":
                return str(error)
            if failures > self._settings.max_restarts:
                return f"gave up after {self._settings.max_restarts} restarts in a row; the last reason: {error}"
            logger.error("%s; restarting the engine", error)
            self._pause(RESTART_DELAY_S[min(failures, len(RESTART_DELAY_S)) - 1])

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not (self._closing or self._killed):
            time.sleep(min(left, TURN_S))

    def _live(self) -> NonetError:
        """One child from start to end; returns what ended it."""
        self._begin_life()
        self._generation += 1
        try:
            child = EngineChild(self._factory, self._early)
        except OSError as error:
            return EngineDeadError(f"the engine process could not be started: {error}")
        self._child = child
        try:
            cause = self._watch(child)
            if self._status is EngineStatus.OK and not self._closing:
                self._fail_pending(EngineStatus.STARTING, str(cause))  # at once, before the child is cleared away
                self._inbox.put(EngineDeadError(str(cause)))
            return cause
        finally:
            child.close(EXIT_GRACE_S if self._end is not None else 0.0)
            self._dropped_before += child.dropped
            self._child = None

    def _watch(self, child: EngineChild) -> NonetError:
        deadline = time.monotonic() + self._settings.start_timeout
        while True:
            child.wait(self._wake_read, TURN_S, reading=not self._inbox.full)
            self._clear_wake()
            died = child.exit_status is not None  # asked first: what it sent before is still read below
            self._read(child, everything=died)
            if self._end is not None:
                return self._end
            if died:
                return EngineDeadError(f"the engine process {_exit_words(child.exit_status)}")
            if self._status is EngineStatus.OK and self.health().step_age > self._settings.freeze_timeout:
                return EngineDeadError(f"the engine was silent for freeze_timeout={self._settings.freeze_timeout:g} s")
            if self._status is EngineStatus.STARTING:
                if self._closing or self._killed:
                    return EngineDeadError("closed while starting")
                if time.monotonic() > deadline:
                    return self._start_timed_out()
            self._flush(child)

    def _start_timed_out(self) -> NonetError:
        limit = self._settings.start_timeout
        return EngineDeadError(
            f"the engine did not start within start_timeout={limit:g} s (at: {self._detail}); raise start_timeout"
        )

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _flush(self, child: EngineChild) -> None:
        with self._lock:
            while self._outbox and child.send(self._outbox[0]):
                self._outbox.popleft()

    def _read(self, child: EngineChild, *, everything: bool) -> None:
        if self._inbox.full:
            self._seen(time.monotonic())  # we do not listen: its silence is ours
        while (everything or not self._inbox.full) and self._end is None:
            try:
                message = child.receive()
            except WireError as error:  # of our own engine: an output may be lost, and nobody knows whose
                self._end = EngineDeadError(f"the engine sent what is no message: {error}")
                return
            if message is None:
                return
            self._handle(child, message)

    def _handle(self, child: EngineChild, message: AnyMessage) -> None:
        match message:
            case Output():
                self._on_output(message)
                if self._end is not None:
                    child.kill()
            case Heartbeat():
                self._seen(message.loop_time)
                self.step, self.engine_dropped = message.step, message.dropped
            case Reply():
                self._on_reply(message)
            case Loading():
                self._on_loading(child, message)
            case Ready():
                self._on_ready(message.info)
            case StartFailed():
                self._end = getattr(errors, message.error)(message.message)
            case Stopped():
                self._end = EngineDeadError(f"the engine stopped: {message.reason}")
            case _:
                child.dropped += 1

    def _on_loading(self, child: EngineChild, message: Loading) -> None:
        if not self._greeted:
            self._greeted = True
            settings, plugins = self._hello
            child.send(encode(Hello(version=nonet_version(), settings=settings, plugins=plugins)))
        self._on_progress(message.what, message.done, message.total)

    def _on_output(self, message: Output) -> None:
        """A repeated frame is ignored; a gap means lost tokens, which only a new engine can make good."""
        self._seen(time.monotonic())
        if message.sequence < self._next_sequence:
            return
        if message.sequence > self._next_sequence:
            self._end = EngineDeadError(f"output {self._next_sequence} of the engine was lost")
            return
        self._next_sequence += 1
        output = message.output
        self._served = self._served or any(map(_ended_well, output.deltas))
        if message.more or self._parts:
            self._parts += output.deltas
            output = msgspec.structs.replace(output, deltas=self._parts)
        if not message.more:
            self._parts = []
            self._inbox.put(output)


def _ended_well(delta: TokenDelta) -> bool:
    return delta.finish_reason not in (None, FinishReason.ERROR, FinishReason.ABORT, FinishReason.EXPIRED)


def _exit_words(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by signal {signal.Signals(-status).name}"


def _wake_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
