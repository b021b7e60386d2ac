"""What `chat` and `generate` share: a frontend of the terminal, with front and engine in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from core.commands.request_arguments import split
from core.progress import ProgressBars
from core.session import log_to_stderr, open_session, run_frontend


def run_in_terminal(frontend: str, arguments: Sequence[str]) -> int:
    log_to_stderr(logging.WARNING)
    parts = split(arguments)
    session = open_session([f"frontend={frontend}", "process.separate=false", *parts.overrides], parts.request)
    asyncio.run(run_frontend(session, ProgressBars()))
    return 0
