"""A thread that keeps one process that compiles, and gives it one grammar after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from core.errors import EngineDeadError, described
from core.grammar.compile_child import CompileChild, CompilerStartError, Lost
from core.grammar.frames import Boot, Compile, Compiled, Refused

log = logging.getLogger("nonet.grammars")

RESTART_DELAY_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # after the first, second … start in a row that failed

Answer = Compiled | Refused | Lost


class CompileWorker:
    """The process of one thread; only `close` may be called from another."""

    def __init__(self, boot: Boot, clock: Callable[[], float] = time.monotonic):
        self._boot = boot
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._child: CompileChild | None = None
        self._start_failures = 0
        self._failed_at = 0.0
        self._start_error = ""

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    def compile(self, job: Compile, timeout_s: float, on_slow: Callable[[], None]) -> Answer:
        """Raises CompilerStartError, and EngineDeadError once it is closed. `on_slow`: see `CompileChild.compile`.

        A process that ended before it came to the grammar is replaced, once.
        """
        for _ in range(2):
            child = self._have_child()
            answer = child.compile(job, timeout_s, on_slow)
            if self._closed:
                raise closing()
            if isinstance(answer, Lost):
                log.warning("the process that compiles grammars is replaced: %s (%s)", answer.detail, answer.how)
            if not isinstance(answer, Compiled | Refused) or self._has_grown(child):
                self.drop()
            if answer is not None:
                return answer
        raise CompilerStartError("it ends as soon as it has started")

    def prepare(self) -> None:
        """Have the process ready for the next grammar. Why it cannot be is told when one comes."""
        try:
            self._have_child()
        except EngineDeadError:
            pass
        except CompilerStartError as error:
            if self._start_failures == 1:
                log.error("the process that compiles grammars does not start: %s", error)

    def close(self) -> None:
        """From any thread: ends the process, also in the middle of a grammar. `drop` clears it away."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()

    def drop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _has_grown(self, child: CompileChild) -> bool:
        """Half way to its limit it is replaced in time: else an innocent grammar would be the one too much."""
        start, limit = child.memory_at_start, self._boot.memory
        return bool(limit) and child.memory > start + max(limit - start, 0) // 2

    def _have_child(self) -> CompileChild:
        """Raises CompilerStartError, EngineDeadError."""
        if self._child is not None and self._child.ended:
            self.drop()
        if self._child is not None:
            return self._child
        if self._start_failures and self._clock() - self._failed_at < self._delay():
            raise CompilerStartError(self._start_error)
        try:
            child = self._started()
        except CompilerStartError as error:
            self.drop()
            if self._closed:
                raise closing() from None
            self._start_failures += 1
            self._failed_at, self._start_error = self._clock(), str(error)
            raise
        self._start_failures = 0
        return child

    def _delay(self) -> float:
        return RESTART_DELAY_S[min(self._start_failures, len(RESTART_DELAY_S)) - 1]

    def _started(self) -> CompileChild:
        with self._lock:
            if self._closed:
                raise closing()
            try:
                child = self._child = CompileChild(self._boot)
            except OSError as error:
                raise CompilerStartError(described(error)) from None
        child.wait_ready()
        return child


def closing() -> EngineDeadError:
    return EngineDeadError("the server is shutting down")
