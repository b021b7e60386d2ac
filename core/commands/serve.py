"""`serve`: the configured frontend (HTTP by default), engine in its own process.

SIGTERM while it starts undoes the start and exits with 0, SIGINT with 130; later the frontend handles signals itself. The engine
process is begun first: on two cores it imports what it needs while this one does, and reads its config.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from types import FrameType

from core.border.early import EarlyProcess
from core.errors import Terminated


def run(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _end_start)
    try:
        with EarlyProcess() as early:
            from core.progress import ProgressBars
            from core.session import log_to_stderr, open_session, run_frontend

            log_to_stderr()
            session = open_session(arguments)
            if not session.settings.process.separate:
                early.close()
            asyncio.run(run_frontend(session, ProgressBars(), early))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # on the way out: one more signal must not change the exit status
    return 0


def _end_start(signum: int, frame: FrameType | None) -> None:
    """An exception, so that a blocking download ends too; on its way out the engine is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(0)
