"""The front's end of one process that compiles grammars. Used by one thread; only `kill` may be called from any."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from core.border.early import child_environ
from core.errors import NonetError
from core.grammar.frames import (
    OUT_OF_MEMORY,
    Boot,
    Compile,
    Compiled,
    CompilerMessage,
    FramePipe,
    PipeError,
    Ready,
    Refused,
    StartFailed,
    Trying,
    Warming,
)

COMMAND = (sys.executable, "-P", "-c", "from core.grammar.compile_process import main; main()")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # it has no matrices
EXIT_S = 1.0
SLOW_S = 0.25  # of a grammar: nearly all take some milliseconds
START_S = 60.0  # until it is ready, and for what a backend does before its first grammar


class CompilerStartError(NonetError):
    """The process that compiles grammars does not start; the text says why."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The process ended, or had to be ended, over a grammar: it took too long or too much memory, or crashed.

    "start": over what `backend` does before its first grammar.
    """

    backend: str  # that was at it; "": none was yet
    how: Literal["slow", "memory", "crash", "start"]
    detail: str = ""  # for the operator
    left_s: float = 0.0  # of the grammar's time, for another backend


class CompileChild:
    """The child lives as long as the thread that made it: the kernel ends it with its parent thread."""

    def __init__(self, boot: Boot):
        """Raises OSError where no process can be started."""
        environ = {**ONE_THREAD, **child_environ()}
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environ)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = FramePipe(self._process.stdout.fileno(), self._process.stdin.fileno(), CompilerMessage)
        self._boot = boot
        self.memory_at_start = self.memory = 0  # bytes in use; 0: unknown

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_ready(self) -> None:
        """Raises CompilerStartError."""
        deadline = time.monotonic() + START_S
        try:
            self._pipe.send(self._boot, deadline)
            message = self._pipe.receive(deadline)
        except (TimeoutError, PipeError) as error:
            raise CompilerStartError(str(error) or f"it was not ready within {START_S:g} s") from None
        if isinstance(message, StartFailed):
            raise CompilerStartError(message.reason)
        if not isinstance(message, Ready):
            raise CompilerStartError(f"it {exit_words(self._exit_status())}")
        self.memory_at_start = self.memory = message.memory

    def compile(self, job: Compile, timeout_s: float, on_slow: Callable[[], None]) -> Compiled | Refused | Lost | None:
        """After `Lost` the process is good for nothing. None: it had ended before it came to this grammar.

        `on_slow` is called where it takes more than `SLOW_S`.
        """
        turn = _Turn(timeout_s)
        try:
            self._pipe.send(job, turn.deadline)
            slow_at = time.monotonic() + SLOW_S
            while True:
                try:
                    message = self._pipe.receive(min(turn.deadline, slow_at))
                except TimeoutError:
                    if time.monotonic() >= turn.deadline:
                        raise
                    slow_at = math.inf
                    on_slow()
                    continue
                if isinstance(message, Compiled | Refused):
                    self.memory = message.memory
                    return message
                if not isinstance(message, Warming | Trying):
                    break
                turn.note(message)
        except TimeoutError:
            return turn.lost("slow", f"{timeout_s:g} s are over")
        except PipeError as error:
            return turn.lost("crash", str(error)) if turn.begun else None
        if not turn.begun:
            return None
        status = self._exit_status()
        return turn.lost("memory" if status == OUT_OF_MEMORY else "crash", f"it {exit_words(status)}")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End it, and leave no trace."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _exit_status(self) -> int | None:
        """Once its pipe is closed."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_S)
        return None


class _Turn:
    """Whose turn it is, and until when. Before the first backend begins, the process may still be busy with itself."""

    def __init__(self, timeout_s: float):
        self._backend = ""
        self._left: float | None = timeout_s  # seconds, while the grammar's time does not run
        self.begun = False
        self.deadline = time.monotonic() + START_S

    def note(self, message: Warming | Trying) -> None:
        now, self._backend, self.begun = time.monotonic(), message.backend, True
        if isinstance(message, Trying) and self._left is not None:
            self.deadline, self._left = now + self._left, None
        elif isinstance(message, Warming) and self._left is None:
            self.deadline, self._left = now + START_S, self.deadline - now

    def lost(self, how: Literal["slow", "memory", "crash"], detail: str) -> Lost:
        left_s = self._left if self._left is not None else max(self.deadline - time.monotonic(), 0.0)
        return Lost(self._backend, how if self._left is None else "start", detail, left_s)


def exit_words(status: int | None) -> str:
    if status is None:
        return "closed its pipe"
    return f"ended with exit status {status}" if status >= 0 else f"was killed by signal {signal.Signals(-status).name}"
