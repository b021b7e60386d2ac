"""`bench`: a closed-loop run of synthetic requests through the whole pipeline in this process; JSON on stdout, a summary on
stderr."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from core.commands.explain import is_default, rows
from core.commands.request_arguments import split
from core.config.keys import validated
from core.lab.bench import StepLog, measure
from core.lab.machine import machine
from core.lab.workloads import FixedLengths
from core.progress import ProgressBars
from core.session import Session, log_to_stderr, open_session, start_front

IDENTITY = ("stage", "name", "wheel", "version")


def run(arguments: Sequence[str]) -> int:
    """`bench +preset=chat num_requests=32 input_len=128 output_len=64 concurrency=32`."""
    log_to_stderr(logging.WARNING)
    parts = split(arguments)
    workload = validated(FixedLengths, parts.request, "bench")
    # A closed loop bounds itself: nobody is to be turned away.
    session = open_session(["process.separate=false", "admission=open", *parts.overrides])
    report = asyncio.run(_bench(session, workload))
    print(summary(report), file=sys.stderr)
    print(json.dumps(report, indent=2))
    return 0


async def _bench(session: Session, workload: FixedLengths) -> dict[str, Any]:
    log = StepLog()
    front = await start_front(session, ProgressBars(), taps=(log,))
    bar = tqdm(total=workload.num_requests, desc="requests", file=sys.stderr, disable=None)
    try:
        report = await measure(front, workload, log, bar.update)
    finally:
        bar.close()
        await front.close()
    return {
        **report,
        "pipeline": pipeline(session),
        "machine": machine(),
        "model": session.settings.model.source,
    }


def summary(report: Mapping[str, Any]) -> str:
    """Five lines for a reader."""
    steps = report["steps"]
    return "\n".join(
        (
            f"output           {report['output_tokens_per_s']:.1f} tokens/s",
            f"TTFT p50         {_milliseconds(report['ttft_s'])}",
            f"TPOT p50         {_milliseconds(report['tpot_s'])}",
            f"framework share  {100 * steps['framework_share']:.1f} % of a step",
            f"steps            {steps['count']}, of {steps['mean_requests']:.1f} requests on average",
        )
    )


def _milliseconds(quantiles: Mapping[str, float]) -> str:
    return f"{1000 * quantiles['p50']:.1f} ms" if quantiles else "not measured: one token per request"


def pipeline(session: Session) -> list[dict[str, Any]]:
    """stage, name, wheel and version of each part, and the settings that a file or an override sets: all others are the
    defaults of that version (`explain --json` has them)."""
    return [{**{key: row[key] for key in IDENTITY if key in row}, "settings": _set(row)} for row in rows(session)]


def _set(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found["value"] for key, found in row["settings"].items() if not is_default(found["origin"])}
