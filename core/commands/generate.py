"""`generate`: one prompt to stdout, or a JSONL file with a progress bar. Front and engine share this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from core.commands.request_arguments import split
from core.progress import ProgressBars
from core.session import log_to_stderr, open_session, run_frontend


def run(arguments: Sequence[str]) -> int:
    log_to_stderr(logging.WARNING)
    parts = split(arguments)
    session = open_session(["frontend=offline", "process.separate=false", *parts.overrides], parts.request)
    asyncio.run(run_frontend(session, ProgressBars()))
    return 0
