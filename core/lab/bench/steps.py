"""Where the engine loop's time went, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from core.outputs import StepStats

FRAMEWORK = ("between_s", "schedule_s", "build_s", "output_s")
MODEL = ("forward_s", "sample_s")


@dataclass(slots=True)
class StepLog:
    """An observer of `step_finished` that keeps what it sees."""

    steps: list[StepStats] = field(default_factory=list)

    def __call__(self, stats: StepStats) -> None:
        if stats.num_requests:
            self.steps.append(stats)


def step_report(steps: Sequence[StepStats]) -> dict[str, Any]:
    """`framework_share` is everything but the model and the sampler, over the whole: scheduling, batch building, output
    handling, and what lies between two steps (messages, handing outputs over)."""
    totals = {name: sum(getattr(step, name) for step in steps) for name in (*FRAMEWORK, *MODEL)}
    whole = sum(totals.values()) or 1.0
    return {
        "count": len(steps),
        "mean_requests": fmean([step.num_requests for step in steps]) if steps else 0.0,
        "preemptions": sum(step.num_preemptions for step in steps),
        "seconds": totals,
        "shares": {name.removesuffix("_s"): value / whole for name, value in totals.items()},
        "framework_share": sum(totals[name] for name in FRAMEWORK) / whole,
        "framework_ms_per_step": 1000 * sum(totals[name] for name in FRAMEWORK) / max(len(steps), 1),
        "detokenize_ms_per_step": 1000 * sum(step.detokenize_s for step in steps) / max(len(steps), 1),
    }
