"""`serve`: the configured frontend (HTTP by default), engine in its own process.

SIGTERM while it starts undoes the start and exits with 0, SIGINT with 130; later the frontend handles signals itself. The engine
process is begun first: on two cores it imports what it needs while this one does, and reads its config.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

from core.border.early import EarlyProcess
from core.errors import Terminated

NOW = 3  # signals, after which nothing is waited for


def run(arguments: Sequence[str]) -> int:
    with _StartSignals() as signals, EarlyProcess() as early:
        from core.progress import ProgressBars
        from core.session import log_to_stderr, open_session, run_frontend

        log_to_stderr()
        session = open_session(arguments)
        if not session.settings.process.separate:
            early.close()
        signals.check()
        asyncio.run(run_frontend(session, ProgressBars(), early))
    return 0


class _StartSignals:
    """`with _StartSignals():` a signal becomes Terminated, so that a blocking download ends too; the engine is closed on the way.

    Also SIGINT, since a KeyboardInterrupt within an `exec` (how dataclasses are made) decides the exit status of CPython even
    where it is caught. Code that is interrupted may swallow the exception or answer with another: the exit status is the same.
    One more signal changes nothing, and the one after it waits for nothing: a thread may read from a disk that does not answer.
    """

    def __init__(self) -> None:
        self._num_signals = 0
        self._status: int | None = None

    def __enter__(self) -> _StartSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_signals = max(self._num_signals, 1)  # on the way out none is the first
        if not isinstance(error, Terminated):
            self.check()

    def check(self) -> None:
        """Raises Terminated where there was a signal."""
        if self._status is not None:
            raise Terminated(self._status)

    def _count(self, signum: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._status = 128 + signum if signum == signal.SIGINT else 0
            self.check()
        elif self._num_signals >= NOW:
            os._exit(self._status or 0)
