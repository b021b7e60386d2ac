"""An engine process before anything is known of its engine, and how such processes are begun. Imports little itself."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType

from core.host_cpu import num_cores

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-c", "from core.process import main; main()")
EARLY = "early"  # the argument of a process that imports while it waits for its boot record
EARLY_IMPORTS = ("torch", "core.assembly", "core.engine", "core.model.local_executor")
"""What engines need whatever they are made of. An engine of other parts does not mind."""


def child_environ() -> dict[str, str]:
    """Environment of a child that imports what this process does, also where its working directory is another."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


def start_process(*arguments: str) -> subprocess.Popen[bytes]:
    """A process that waits for its boot record. Where SIGINT is blocked here it is there, until the process ignores it."""
    return subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.PIPE, bufsize=0, env=child_environ())


class EarlyProcess:
    """`with EarlyProcess() as early:` around a command that is going to start an engine process.

    It imports for some seconds what every engine needs while this process reads its config, on another core: with one core
    there is none. The first engine process takes it over; it is ended where nobody has, and has then been told of no model.
    The thread that makes it has to outlive the engine: the kernel ends one with the other.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # `take` and `close` come from two threads
        self._environ = child_environ()
        if num_cores() > 1:
            self._begin()

    def _begin(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: it must not die of Ctrl-C
        try:
            with suppress(OSError):  # the engine process will tell why
                self._process = start_process(EARLY)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> EarlyProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> subprocess.Popen[bytes] | None:
        """The process, once, and only where it is alive and what it was given would still be given to it."""
        process = self._let_go()
        if process is None:
            return None
        if (status := process.poll()) is not None:
            logger.warning("the early engine process ended with status %d; another one is started", status)
        elif child_environ() == self._environ:
            return process
        _end(process)
        return None

    def close(self) -> None:
        process = self._let_go()
        if process is not None:
            _end(process)

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            process, self._process = self._process, None
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
