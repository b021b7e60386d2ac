"""What a step costs the scheduler: `schedule` and `update` of N plain decodes, and how it grows with N.

`python -m core.lab.scheduling_cost`. A few of the running requests have sequences of 128K tokens. Median over steps, and the
least of three rounds; the line
is a least-squares fit of cost over N, and its R² says how linear the growth is. Batch building is shown beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from core.batch import SchedulerOutput, Verdict
from core.batching import BatchBuilder
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.process import collect_rarely
from core.request import Request, SamplingParams
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.decode import DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.stages.scheduler import Scheduler, SchedulerContext

MakeScheduler = Callable[[QueueSettings, SchedulerContext], Scheduler]
SIZES = (64, 256, 512, 1024, 2000)
BLOCK_SIZE: Final = 16
LONGEST = 131_072  # tokens of the longest sequence
NUM_LONG = 4
LENGTHS = (17, 500, 33, 2000)  # tokens of the others' prompts
MAX_TOKENS = 1_000  # of each answer: no request ends while it is measured, and a pool holds all that they may have
ROUNDS = 3  # of all sizes, one after the other: what else the machine does in one of them counts in none


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Of one step with `num_running` decodes. Milliseconds."""

    num_running: int
    schedule_ms: float
    update_ms: float
    build_ms: float

    @property
    def scheduling_ms(self) -> float:
        return self.schedule_ms + self.update_ms

    @classmethod
    def least(cls, costs: Sequence[MeasuredCost]) -> MeasuredCost:
        """Of each part, over measurements of the same size."""
        return cls(
            costs[0].num_running,
            min(cost.schedule_ms for cost in costs),
            min(cost.update_ms for cost in costs),
            min(cost.build_ms for cost in costs),
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """scheduling_ms = fixed_ms + us_per_request * num_running / 1000."""

    fixed_ms: float
    us_per_request: float
    r_squared: float

    @classmethod
    def of(cls, costs: Sequence[MeasuredCost]) -> Growth:
        x, y = np.array([[c.num_running, c.scheduling_ms] for c in costs]).T
        slope, fixed = np.polyfit(x, y, 1)
        residual = ((y - fixed - slope * x) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        return cls(float(fixed), float(1000 * slope), float(1 - residual))


def fcfs(settings: QueueSettings, context: SchedulerContext) -> Scheduler:
    return QueueScheduler(settings, context, Policy())


def step_cost(num_running: int, make: MakeScheduler = fcfs, num_steps: int = 200) -> MeasuredCost:
    """Median over `num_steps` steps in which all decode. Raises ValueError where answers would end before that."""
    if num_steps > MAX_TOKENS // 2:
        raise ValueError(f"num_steps: at most {MAX_TOKENS // 2}, not {num_steps}")
    lengths = [LONGEST if i < NUM_LONG else LENGTHS[i % len(LENGTHS)] for i in range(num_running)]
    scheduler = make(*_setting(lengths))
    builder = BatchBuilder(BLOCK_SIZE, 2 * LONGEST)
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        scheduler.add(Request(f"r{index}", [index % 50] * length, params))
    collect_rarely()  # as an engine process does
    times: list[tuple[float, float, float]] = []
    while len(times) < num_steps:
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        builder.build(plan)
        built = time.perf_counter()
        verdicts = _verdicts(plan)
        judged = time.perf_counter()
        scheduler.update(plan, verdicts)
        if len(plan.scheduled) == plan.num_scheduled_tokens == num_running:
            times.append((scheduled - started, time.perf_counter() - judged, built - scheduled))
    schedule, update, build = (1000 * median(column) for column in zip(*times, strict=True))
    return MeasuredCost(num_running, schedule, update, build)


def _setting(lengths: Sequence[int]) -> tuple[QueueSettings, SchedulerContext]:
    """Whole prompts in a step, and a pool that never runs out: what is measured is decodes."""
    budget = sum(lengths) + len(lengths)
    num_blocks = sum((length + MAX_TOKENS) // BLOCK_SIZE + 2 for length in lengths)
    settings = QueueSettings(max_num_running_reqs=len(lengths), max_num_scheduled_tokens=budget)
    cache = PagedCache(
        PagedCache.Settings(block_size=BLOCK_SIZE, enable_prefix_caching=False), CacheContext(num_blocks, 2 * LONGEST)
    )
    prefill = Chunked(Chunked.Settings(chunk_size=LONGEST, long_chunk_size=LONGEST), PrefillContext(budget))
    decode = Plain(Plain.Settings(), DecodeContext(2 * LONGEST))
    return settings, SchedulerContext(cache, prefill, decode, time.monotonic, 2 * LONGEST)


def _verdicts(plan: SchedulerOutput) -> dict[str, Verdict]:
    return {part.request.request_id: Verdict((5,)) for part in plan.scheduled if part.samples}


def measure(sizes: Sequence[int] = SIZES, make: MakeScheduler = fcfs) -> tuple[list[MeasuredCost], Growth]:
    """`make(settings, context)` gives the scheduler: any one that is built from the records of `core.stages.scheduler`.

    Each cost is the least of `ROUNDS` measurements: a busy machine only ever adds to it.
    """
    rounds = [[step_cost(size, make) for size in sizes] for _ in range(ROUNDS)]
    costs = [MeasuredCost.least(found) for found in zip(*rounds, strict=True)]
    return costs, Growth.of(costs)


def report(costs: Sequence[MeasuredCost], growth: Growth) -> str:
    lines = ["running  schedule  update  together  (batch building)   ms per step"]
    for cost in costs:
        lines.append(
            f"{cost.num_running:7d}  {cost.schedule_ms:8.3f}  {cost.update_ms:6.3f}  {cost.scheduling_ms:8.3f}  "
            f"({cost.build_ms:.3f})"
        )
    lines.append(
        f"fit: {growth.fixed_ms:.3f} ms + {growth.us_per_request:.3f} µs per running request, R² {growth.r_squared:.4f}"
    )
    return "\n".join(lines)


def main() -> int:
    print(report(*measure()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
