"""What a scheduler by deadlines promises, as tests::

class TestMine(SchedulerContract, DeadlineContract):
    component = Mine
    settings = {"ttft_s": 0.5, "late_every": 3}
    ttft_s = 0.5
    late_every = 3
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from core.request import Request
from core.testing.fakes import Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks, SeenStep, seen_step


class DeadlineContract(SchedulerChecks):
    """Of requests without output the earliest deadline is admitted first; those that have missed theirs come after those that
    can still meet it, but for one of `late_every` admissions."""

    ttft_s: ClassVar[float]
    """Seconds to the first token, under `settings`."""
    late_every: ClassVar[int]
    lead_s: ClassVar[float] = 0.0
    """A request that is due in less than this may count as late: its first token takes time."""

    def due(self, request: Request) -> float:
        due = request.arrival_time + self.ttft_s
        return due if request.deadline is None else min(due, request.deadline)

    @OVERLAP
    @pytest.mark.parametrize("load", [0.5, 1.5])
    def test_deadlines_are_kept_in_order(self, load: float, num_in_flight: int) -> None:
        """Four slots, `load` of what they carry, deadlines of their own for some."""
        rng = random.Random(load)
        engine = self.make_engine(200, Limits(max_num_running_reqs=4), num_in_flight=num_in_flight)
        engine.step_s = self.ttft_s / 12
        watch, requests = DeadlineWatch(self), self.random_requests(rng, 120, max_tokens=20)
        pending = list(requests)
        while pending or engine.requests:
            if pending and rng.random() < load * 4 / 11:
                request = pending.pop()
                if rng.random() < 0.3:
                    request.deadline = engine.clock() + self.ttft_s * (0.5 + rng.random())
                engine.add(request)
            watch.take_in(seen_step(engine))
        engine.drain()
        assert watch.num_late if load > 1 else watch.num_on_time > 100

    def test_late_requests_yield(self) -> None:
        engine = self.make_engine(200, Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 5))
        engine.step()
        late = [make_request(f"late{index}", [index], 2) for index in range(2)]
        engine.add(*late)
        engine.clock.advance(self.ttft_s * 1.01)
        engine.add(make_request("in time", [3], 2))
        engine.drain()
        assert engine.first_scheduled.index("in time") < engine.first_scheduled.index("late0")
        assert engine.first_scheduled.index("late0") < engine.first_scheduled.index("late1")

    def test_nobody_starves(self) -> None:
        """Late requests get their turn under a load that never lets up."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 4))
        engine.step()
        engine.step()
        late = [make_request(f"late{index}", [index], 2) for index in range(5)]
        engine.add(*late)
        engine.clock.advance(self.ttft_s * 1.01)
        for index in range(200):
            engine.add(make_request(f"r{index}", [index % 50], 2))
            engine.step()
            engine.step()
        order = engine.first_scheduled[1:]
        places = [order.index(request.request_id) for request in late]
        assert places == sorted(places)
        assert all(place < (index + 1) * self.late_every for index, place in enumerate(places))
        engine.drain()


class DeadlineWatch:
    """Who was admitted, compared with who was not. Sees nothing of requests that have output: their times are not its own."""

    def __init__(self, contract: DeadlineContract):
        self._due = contract.due
        self._late_every = contract.late_every
        self._lead_s = contract.lead_s
        self._num_since_late = 0
        self._num_while_late = 0  # of them, while a late one waited
        self.num_late = self.num_on_time = 0  # admissions

    def take_in(self, step: SeenStep) -> None:
        new = [r for r in step.passed if r not in step.begun and r not in step.output.preempted]
        late = [request for request in new if self._due(request) < step.now]
        on_time = [request for request in new if self._due(request) >= step.now + self._lead_s]
        for request in step.admitted:
            self._num_since_late += 1
            if request in step.begun or step.now <= self._due(request) < step.now + self._lead_s:
                self._num_while_late = 0  # it may count as late
            elif self._due(request) < step.now:
                self._admit_late(request, late, on_time)
            else:
                self._admit_on_time(request, on_time, bool(late))
        self._num_while_late = self._num_while_late if late else 0

    def _admit_late(self, request: Request, late: list[Request], on_time: list[Request]) -> None:
        before = [r.request_id for r in late if self._due(r) < self._due(request)]
        assert not before, f"{before} were due before {request.request_id}"
        waits = [r.request_id for r in on_time]
        assert not waits or self._num_since_late >= self._late_every, f"{request.request_id} does not yield to {waits}"
        self._num_since_late = self._num_while_late = 0
        self.num_late += 1

    def _admit_on_time(self, request: Request, on_time: list[Request], late_waits: bool) -> None:
        before = [r.request_id for r in on_time if self._due(r) < self._due(request)]
        assert not before, f"{before} are due before {request.request_id}"
        self._num_while_late += 1
        self.num_on_time += 1
        assert not late_waits or self._num_while_late < self._late_every, "late requests do not get their turn"
