"""Offline measurement of a whole pipeline: throughput, TTFT, TPOT, and what the framework itself costs per step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from core.front.front import Front
from core.lab.workloads import FixedLengths, WorkItem, fixed_lengths
from core.outputs import StepStats, Timings
from core.request import SamplingParams
from core.simulation.metrics import summary
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt

FRAMEWORK = ("between_s", "schedule_s", "build_s", "output_s")
MODEL = ("forward_s", "sample_s")


@dataclass(slots=True)
class StepLog:
    """An observer of `step_finished` that keeps what it sees."""

    steps: list[StepStats] = field(default_factory=list)

    def __call__(self, stats: StepStats) -> None:
        if stats.num_requests:
            self.steps.append(stats)


async def measure(
    front: Front, settings: FixedLengths, log: StepLog, on_done: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Run the workload in a closed loop. Returns a JSON-ready report; times in seconds, rates per second."""
    items = fixed_lengths(settings, front.model)
    for index, item in enumerate(items[: settings.warmup]):
        await _one(front, f"warmup-{index}", item)
    log.steps.clear()
    slots = asyncio.Semaphore(settings.concurrency)

    async def one(index: int, item: WorkItem) -> Timings:
        async with slots:
            timings = await _one(front, f"bench-{index}", item)
        on_done()
        return timings

    started = time.perf_counter()
    timings = await asyncio.gather(*(one(i, item) for i, item in enumerate(items[settings.warmup :])))
    wall = time.perf_counter() - started
    return {
        "workload": settings.model_dump(),
        "wall_s": wall,
        "output_tokens_per_s": settings.num_requests * settings.output_len / wall,
        "total_tokens_per_s": settings.num_requests * (settings.input_len + settings.output_len) / wall,
        "ttft_s": measured([t.ttft for t in timings]),
        "tpot_s": measured([t.tpot for t in timings]),
        "e2e_s": measured([t.e2e for t in timings]),
        "steps": step_report(log.steps),
    }


async def _one(front: Front, request_id: str, item: WorkItem) -> Timings:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id, TokenPrompt(item.prompt_token_ids), params, max_tokens=item.output_len)
    async with aclosing(front.generate(request)) as outputs:
        last = [choice async for output in outputs for choice in output.outputs][-1]
    assert last.timings is not None
    return last.timings


def step_report(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Where the engine loop's time went. `framework_share` is everything but the model and the sampler, over the whole:
    scheduling, batch building, output handling, and what lies between two steps (messages, handing outputs over)."""
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


def measured(values: Sequence[float | None]) -> dict[str, float]:
    """Summary of what was measured: a request of one token has no TPOT."""
    return summary(np.array([value for value in values if value is not None], np.float64))
