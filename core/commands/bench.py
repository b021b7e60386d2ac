"""`bench`: a workload of synthetic requests through the whole pipeline in this process, or against a server; JSON on stdout, a
summary on stderr."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.commands.explain import is_default, rows
from core.commands.request_arguments import split
from core.lab.bench.report import summary
from core.lab.bench.run import Asked, BenchSettings, UrlSettings, bench_url
from core.lab.bench.workloads import DEFAULT, WORKLOADS, line_of, workload_class
from core.lab.machine import machine
from core.session import Session, log_to_stderr, open_session
from core.simulation.keys import described_keys

if TYPE_CHECKING:
    from core.lab.bench.figures import Report

HELP = ("-h", "--help")
IDENTITY = ("stage", "name", "wheel", "version")


def run(arguments: Sequence[str]) -> int:
    """`bench workload=single repeat=3 +preset=chat`, `bench url=http://127.0.0.1:8000 concurrency=8`."""
    log_to_stderr(logging.WARNING)
    if any(word in HELP for word in arguments):
        print(help_text())
        return 0
    parts = split(arguments)
    asked = Asked.of(parts.request, parts.overrides)
    report = asyncio.run(bench_url(asked)) if asked.url.url else _in_process(asked)
    print(summary(report), file=sys.stderr)
    print(json.dumps({**report, "machine": machine()}, indent=2))
    return 0


def _in_process(asked: Asked) -> Report:
    from core.lab.bench.engine import bench_session

    session = open_session(asked.in_process)
    parts = pipeline(session)
    print(_through(asked, parts), file=sys.stderr)
    report = asyncio.run(bench_session(session, asked))
    return {**report, "pipeline": parts, "model": session.settings.model.source}


def _through(asked: Asked, parts: Sequence[Mapping[str, Any]]) -> str:
    """What is about to run, of `pipeline`: a bare config's layers are slow enough to look like none."""
    names = {part["stage"]: part["name"] for part in parts if "name" in part}
    layers = " ".join(f"{group}={names[group]}" for group in ("model", "attention", "quant") if group in names)
    hint = "; +preset=chat runs compiled code" if names.get("model") == "native" else ""
    return f"{asked.workload.num_calls} calls through {layers}{hint}"


def help_text() -> str:
    lines = [
        "nonet bench: a workload through the whole pipeline, or against a server; figures as JSON, a summary on stderr"
    ]
    lines += ["for example: nonet bench workload=single repeat=3 +preset=chat"]
    lines += ["             nonet bench url=http://127.0.0.1:8000 concurrency=8 num_requests=32", ""]
    lines += [*described_keys(BenchSettings), *described_keys(UrlSettings)]
    for name in WORKLOADS:
        lines += ["", f"workload={name}{' (the default)' if name == DEFAULT else ''}: {line_of(name)}"]
        lines += described_keys(workload_class(name).Settings)
    lines += ["", "Words with a dot, and those that select a component, are config: `nonet explain` prints it."]
    return "\n".join([*lines, "With url=, model=NAME is the model that the server is asked for; else its first."])


def pipeline(session: Session) -> list[dict[str, Any]]:
    """stage, name, wheel and version of each part, and the settings that a file or an override sets: all others are the
    defaults of that version (`explain --json` has them)."""
    return [{**{key: row[key] for key in IDENTITY if key in row}, "settings": _set(row)} for row in rows(session)]


def _set(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found["value"] for key, found in row["settings"].items() if not is_default(found["origin"])}
