"""What grammars cost, in numbers: counted in the front, read when somebody asks (`core.metrics`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of `GrammarFigures.compiled`."""


@dataclass(slots=True)
class GrammarFigures:
    """Since the start. Written in the front's threads: a count may miss one, and nothing else."""

    hits: int = 0  # requests whose grammar was in the cache, or was being compiled for another one
    misses: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # requests, by the code of their error
    compiled: list[int] = field(default_factory=lambda: [0] * (len(COMPILE_SECONDS) + 1))  # grammars, by seconds
    taken: Counter[str] = field(default_factory=Counter)  # grammars, by the backend that compiled them
    compile_s: float = 0.0  # of all of them; refused ones, too
    lost_processes: int = 0  # that ended or were ended while they compiled
    cached: int = 0  # grammars in the cache, refused ones included
    cached_bytes: int = 0

    def note_compiled(self, seconds: float) -> None:
        self.compiled[bisect_left(COMPILE_SECONDS, seconds)] += 1
        self.compile_s += seconds
