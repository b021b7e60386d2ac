"""`serve`: the configured frontend (HTTP by default), engine in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from core.progress import ProgressBars
from core.session import log_to_stderr, open_session, run_frontend


def run(arguments: Sequence[str]) -> int:
    log_to_stderr()
    session = open_session(arguments)
    asyncio.run(run_frontend(session, ProgressBars()))
    return 0
