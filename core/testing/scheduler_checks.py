"""What suites and machines of schedulers are made from: the component under test in an engine of fakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.stages.decode import Decode
from core.stages.prefill import Chunked, Prefill, PrefillContext, Whole
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.contract import Contract
from core.testing.fake_loop import assert_complete, fake_engine, random_requests
from core.testing.fakes import FakeClock, FakeEngine, Limits

OVERLAP = pytest.mark.parametrize("num_in_flight", [0, 1, 2], ids=["synchronous", "overlap", "deep overlap"])


@dataclass(frozen=True, slots=True)
class SeenStep:
    """What a step did with those that could have been admitted in it: they waited, with no token in flight."""

    output: SchedulerOutput
    now: float  # when it was planned
    running: tuple[Request, ...]  # before it, in order of `add`
    begun: frozenset[Request]  # had output before it
    in_flight: tuple[Request, ...]  # waited for the last id that they were preempted with; may have held back others
    admitted: tuple[Request, ...]  # in order of admission
    passed: tuple[Request, ...]  # who waits on, in order of `add`


def seen_step(engine: FakeEngine) -> SeenStep:
    """Take a step, and say what it did."""
    before = [request for request in engine.requests.values() if not request.is_finished]
    running = tuple(request for request in before if request.status is RequestStatus.RUNNING)
    others = [request for request in before if request.status is not RequestStatus.RUNNING]
    waiting = {request.request_id: request for request in others if not request.num_pending_tokens}
    in_flight = tuple(request for request in others if request.num_pending_tokens)
    begun = frozenset(request for request in before if request.output_token_ids)
    now = engine.clock()
    output = engine.step()
    admitted = tuple(part.request for part in output.scheduled if part.request.request_id in waiting)
    gone = {request.request_id for request in (*admitted, *output.refused)}
    passed = tuple(request for key, request in waiting.items() if key not in gone)
    return SeenStep(output, now, running, begun, in_flight, admitted, passed)


class SchedulerChecks(Contract):
    """What checks of schedulers are made from; no checks itself."""

    random_requests = staticmethod(random_requests)
    assert_complete = staticmethod(assert_complete)

    def make_scheduler(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        scheduler: Scheduler = self.make(
            context,
            max_num_scheduled_tokens=limits.max_num_scheduled_tokens,
            max_num_running_reqs=limits.max_num_running_reqs,
        )
        return scheduler

    def make_engine(
        self,
        num_blocks: int = 64,
        limits: Limits | None = None,
        *,
        num_in_flight: int = 0,
        decode: Decode | None = None,
        whole: bool = False,
        chunk_size: int = 24,
        chunked: Mapping[str, Any] = MappingProxyType({}),
        prefix_caching: bool = True,
        clock: FakeClock | None = None,
        num_swap_blocks: int = 0,
    ) -> FakeEngine:
        """`chunked`: other settings of `core.stages.prefill.Chunked`."""
        limits = limits or Limits()
        prefill_context = PrefillContext(limits.max_num_scheduled_tokens)
        prefill: Prefill = Chunked(Chunked.Settings(chunk_size=chunk_size, **chunked), prefill_context)
        if whole:
            prefill = Whole(Whole.Settings(), prefill_context)
        return fake_engine(
            num_blocks,
            limits,
            scheduler=self.make_scheduler,
            prefill=prefill,
            decode=decode,
            num_in_flight=num_in_flight,
            prefix_caching=prefix_caching,
            clock=clock,
            num_swap_blocks=num_swap_blocks,
        )
