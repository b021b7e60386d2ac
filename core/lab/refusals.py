"""How fast a config that cannot work is refused, as a user's shell sees it, and that the model's file stays closed.

The model is a named pipe that nobody writes to: a process that opened it would wait for ever.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1.0
HANGS_S = 60.0
TRIES = 3  # the best counts: the machine may be busy

CASES = (
    ("frontend=chat_cli", "renderer=token_ids"),
    ("tool_parser=hermes", "renderer=token_ids"),
    ("tool_parser=hermes", "frontend=offline", "frontend.prompt=x"),
    ("scheduler=fcsf",),
    ("scheduler.max_num_runing_reqs=3",),
    ("observers=[promtheus]",),
    ("logits_processors.dry.multiplyer=1",),
    ("port=8123",),
)
"""Compositions that clash, and slips of the pen."""


@dataclass(frozen=True, slots=True)
class Refusal:
    overrides: tuple[str, ...]
    status: int  # exit status
    message: str
    seconds: float  # the whole process on the clock, best of `tries`
    cpu_s: float  # what it used of a CPU, which a busy machine does not stretch as much

    @property
    def problem(self) -> str:
        if self.status != 1 or self.message.count("\n") != 1:
            return f"ended with {self.status}: {self.message or 'nothing said'}"
        if "choose" not in self.message and "did you mean" not in self.message:
            return f"names no next step: {self.message}"
        took = min(self.seconds, self.cpu_s)
        return "" if took < LIMIT_S else f"took {self.seconds:.2f} s, {self.cpu_s:.2f} s of a CPU"


def refusals(cases: Sequence[tuple[str, ...]] = CASES, tries: int = TRIES, hangs_s: float = HANGS_S) -> list[Refusal]:
    """`hangs_s`: seconds after which a process that has not ended never will."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "model.gguf"
        os.mkfifo(pipe)
        return [
            min((_refused(case, pipe, hangs_s) for _ in range(tries)), key=lambda found: found.seconds)
            for case in cases
        ]


def _refused(overrides: tuple[str, ...], pipe: Path, hangs_s: float) -> Refusal:
    command = [sys.executable, "-m", "core", "serve", "+preset=chat", f"model.source={pipe}", *overrides]
    started, used = time.perf_counter(), _cpu_s()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=hangs_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Refusal(overrides, -1, "it did not end: the model's file was opened", hangs_s, hangs_s)
    return Refusal(overrides, done.returncode, done.stderr, time.perf_counter() - started, _cpu_s() - used)


def _cpu_s() -> float:
    """Of all processes that this one has started and waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
