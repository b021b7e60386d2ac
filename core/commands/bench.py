"""`bench`: a closed-loop run of synthetic requests through the whole pipeline in this process; JSON on stdout."""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from tqdm import tqdm

from core.commands.request_arguments import split
from core.lab.bench import StepLog, measure
from core.lab.workloads import FixedLengths
from core.progress import ProgressBars
from core.session import Session, log_to_stderr, open_session, start_front
from core.settings import validated
from core.version import nonet_version


def run(arguments: Sequence[str]) -> int:
    """`bench +preset=chat num_requests=32 input_len=128 output_len=64 concurrency=32`."""
    log_to_stderr(logging.WARNING)
    parts = split(arguments)
    workload = validated(FixedLengths, parts.request, "bench")
    session = open_session(["process.separate=false", *parts.overrides])
    print(json.dumps(asyncio.run(_bench(session, workload)), indent=2))
    return 0


async def _bench(session: Session, workload: FixedLengths) -> dict[str, Any]:
    log = StepLog()
    front = await start_front(session, ProgressBars(), step_observers=(log,))
    bar = tqdm(total=workload.num_requests, desc="requests", file=sys.stderr, disable=None)
    try:
        report = await measure(front, workload, log, bar.update)
    finally:
        bar.close()
        await front.close()
    return {
        **report,
        "pipeline": session.description.rows(),
        "machine": machine(),
        "model": session.settings.model.source,
    }


def machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "nonet": nonet_version(),
        "torch": version("torch"),
    }
