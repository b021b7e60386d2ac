"""Both sides of a run's books: what an observer wrote per ended request, and what /metrics counts (reliability R10)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.testing.harness.server import metric

REASONS = ("stop", "length", "abort", "error", "repetition", "expired")


@dataclass(slots=True)
class Ledger:
    """What the observer wrote and what /metrics counts; both from `start` on."""

    path: Path
    skip: int
    before: Counter[str]
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, metrics: str) -> Ledger:
        return cls(path, len(path.read_text().splitlines()) if path.exists() else 0, counters(metrics))

    def close(self, metrics: str) -> Counter[str]:
        self.lines = [json.loads(line) for line in self.path.read_text().splitlines()[self.skip :]]
        after = counters(metrics)
        after.subtract(self.before)
        return after


def counters(metrics: str) -> Counter[str]:
    found = {reason: metric(metrics, "nonet_requests_finished_total", finish_reason=reason) for reason in REASONS}
    for name in ("prompt_tokens", "generation_tokens"):
        found[name] = metric(metrics, f"nonet_{name}_total")
    return Counter({name: int(value) for name, value in found.items()})
