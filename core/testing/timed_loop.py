"""Requests that arrive over time, under a scheduler whose steps take time: what a policy does to latencies, always the same.

No model: a step costs `Cost`, and a request ends when it has the tokens that it was to have. Comparing policies on real traffic
is the simulator's, which builds from a config and installed plugins; here a class under test is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from core.batch import SchedulerOutput, Verdict
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.request import FinishReason, Request
from core.stages.decode import DecodeContext, Plain
from core.stages.predictor import MaxTokens, Predictor, PredictorContext
from core.stages.prefill import Chunked, PrefillContext
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.fake_loop import BLOCK_SIZE, MakeScheduler, queue_scheduler
from core.testing.fakes import FakeClock, Limits


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, in seconds."""

    step_s: float = 0.02
    token_s: float = 0.0002

    def of(self, plan: SchedulerOutput) -> float:
        return self.step_s + self.token_s * plan.num_scheduled_tokens


@dataclass(slots=True)
class Timed:
    """What became of a request. Seconds."""

    request: Request
    output_len: int
    ended: float = 0.0

    @property
    def latency(self) -> float:
        return self.ended - self.request.arrival_time


@dataclass(slots=True)
class TimedLoop:
    """One run. `lengths`: how many tokens each request is to have, by id."""

    lengths: Mapping[str, int]
    scheduler: MakeScheduler = queue_scheduler
    predictor: Callable[[PredictorContext], Predictor] = lambda context: MaxTokens(MaxTokens.Settings(), context)
    limits: Limits = field(default_factory=Limits)
    num_blocks: int = 1024
    cost: Cost = field(default_factory=Cost)
    num_preemptions: int = 0

    def run(self, requests: Sequence[Request]) -> dict[str, Timed]:
        """Each is added when it has arrived; `requests` stand in that order."""
        scheduler, clock = self._made()
        timed = {request.request_id: Timed(request, self.lengths[request.request_id]) for request in requests}
        coming, num_left = list(reversed(requests)), len(requests)
        while num_left:
            if num_left == len(coming):  # idle
                clock.now = max(clock.now, coming[-1].arrival_time)
            while coming and coming[-1].arrival_time <= clock.now:
                scheduler.add(coming.pop())
            plan = scheduler.schedule()
            self.num_preemptions += len(plan.preempted)
            clock.advance(self.cost.of(plan))
            ended = [*scheduler.update(plan, self._verdicts(plan)), *plan.refused]
            for request in ended:
                timed[request.request_id].ended = clock.now
            num_left -= len(ended)
        return timed

    def _made(self) -> tuple[Scheduler, FakeClock]:
        limits, clock = self.limits, FakeClock(0.0)
        settings = PagedCache.Settings(block_size=BLOCK_SIZE, enable_prefix_caching=False)
        cache = PagedCache(settings, CacheContext(self.num_blocks, limits.max_model_len))
        chunked = Chunked(Chunked.Settings(), PrefillContext(limits.max_num_scheduled_tokens))
        decode = Plain(Plain.Settings(), DecodeContext(limits.max_model_len))
        predictor = self.predictor(PredictorContext(limits.max_model_len, self.lengths.get))
        context = SchedulerContext(cache, chunked, decode, clock, limits.max_model_len, predictor=predictor)
        return self.scheduler(context, limits), clock

    def _verdicts(self, plan: SchedulerOutput) -> dict[str, Verdict]:
        verdicts = {}
        for part in plan.scheduled:
            request = part.request
            if part.samples:
                is_last = request.num_output_tokens + 1 >= self.lengths[request.request_id]
                verdicts[request.request_id] = Verdict((1,), FinishReason.STOP if is_last else None)
        return verdicts
