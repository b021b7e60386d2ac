"""What a scheduler with levels and aging promises, as tests::

class TestMine(SchedulerContract, AgingContract, DisplacementContract):
    component = Mine
    settings = {"aging_s": 2.0}
    aging_s = 2.0
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from core.request import Request
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks, SeenStep, seen_step

ROUNDING_S = 1e-9


class AgingContract(SchedulerChecks):
    """No request is overtaken by one that arrived `d * aging_s + deadline_s` seconds or more after it, d being the levels by
    which the second is better (negative where it is worse)."""

    aging_s: ClassVar[float]
    """Seconds of waiting that are worth one level, under `settings`."""
    deadline_s: ClassVar[float] = 0.0
    """Seconds that a nearer deadline may be worth besides; requests of these tests have none."""

    def level(self, request: Request) -> int:
        return request.priority

    def bound(self, waiting: Request, other: Request) -> float:
        """Seconds after `waiting` from which on `other` may no longer arrive and be admitted before it."""
        return (self.level(waiting) - self.level(other)) * self.aging_s

    def check_step(self, step: SeenStep, slack_s: float = 0.0) -> None:
        for request in step.admitted:
            for passed in step.passed:
                later = request.arrival_time - passed.arrival_time
                assert later <= self.bound(passed, request) + slack_s + ROUNDING_S, (
                    f"{request.request_id} overtook {passed.request_id}, and came {later} s later"
                )

    @OVERLAP
    @pytest.mark.parametrize("num_blocks", [14, 200])
    def test_nobody_is_overtaken_beyond_the_bound(self, num_blocks: int, num_in_flight: int) -> None:
        rng = random.Random(num_blocks)
        engine = self.make_engine(num_blocks, Limits(max_num_running_reqs=3), num_in_flight=num_in_flight)
        requests = self.random_requests(rng, 60)
        overtaken = 0
        while requests or engine.requests:
            if requests and (rng.random() < 0.3 or not engine.requests):
                request = requests.pop()
                request.priority = rng.randrange(4)
                engine.add(request)
            engine.clock.advance(rng.random() * self.aging_s / 4)
            step = seen_step(engine)
            self.check_step(step)
            overtaken += sum(r.arrival_time > p.arrival_time for r in step.admitted for p in step.passed)
        assert overtaken, "levels were meant to count"
        engine.drain()

    @pytest.mark.parametrize("levels", [1, 2, 5])
    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.01, 2.0])
    def test_the_bound_is_exact(self, levels: int, share: float) -> None:
        """One that comes `share` of the bound later is first exactly where that is below 1."""
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 4))
        engine.step()
        worse, better = make_request("worse", [2], 2, priority=levels), make_request("better", [3], 2)
        engine.add(worse)
        engine.clock.advance(share * levels * self.aging_s)
        engine.add(better)
        engine.drain()
        assert engine.first_scheduled.index("better") < engine.first_scheduled.index("worse") or share > 1
        assert engine.first_scheduled.index("worse") < engine.first_scheduled.index("better") or share < 1
        self.assert_complete(engine, [worse, better])

    def test_equals_run_in_order_of_arrival(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=2))
        requests = [make_request(f"r{index}", [index], 5, priority=1) for index in range(12)]
        for request in requests:
            engine.add(request)
            engine.step()
        engine.drain()
        assert engine.first_scheduled == [request.request_id for request in requests]

    def test_the_wait_of_worse_ones_ends_while_better_ones_keep_coming(self) -> None:
        """1.2 times the load that two slots carry, for the time of four levels, and 20 worse requests at its start (F42)."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=2))
        engine.step_s = self.aging_s / 100
        worse = [make_request(f"worse{index}", [index], 5, priority=2) for index in range(20)]
        engine.add(*worse)
        better: list[Request] = []
        while engine.num_steps < 400:
            while len(better) < engine.num_steps * 1.2 * 2 / 5:
                better.append(make_request(f"better{len(better)}", [len(better) % 50], 5))
                engine.add(better[-1])
            self.check_step(seen_step(engine))
        waiting = [request for request in better if request.request_id not in engine.first_scheduled]
        assert waiting, "the load was meant to be too much"
        assert all(request.is_finished for request in worse)
        assert max(request.num_preemptions for request in worse) <= 2
        engine.drain()


class DisplacementContract(SchedulerChecks):
    """A better request does not wait for the end of a worse one; two requests never push each other out in turn."""

    max_preemptions: ClassVar[int] = 2
    """How often a request may be displaced at most."""

    def low_requests(self, count: int, max_tokens: int = 500) -> list[Request]:
        return [make_request(f"low{index}", [index] * 4, max_tokens, priority=5) for index in range(count)]

    @OVERLAP
    def test_a_better_request_starts_at_once_in_a_full_batch(self, num_in_flight: int) -> None:
        """Bug J5: two slots, two low requests of 500 tokens, then a high one."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=2), num_in_flight=num_in_flight)
        low, high = self.low_requests(2), make_request("high", [9] * 4, 20)
        engine.add(*low)
        for _ in range(5):
            engine.step()
        engine.add(high)
        engine.step()
        engine.step()
        assert "high" in engine.first_scheduled
        assert engine.preempted == ["low1"]
        engine.drain()
        assert next(iter(engine.ended)) == "high"
        self.assert_complete(engine, [*low, high])

    @OVERLAP
    def test_a_better_request_starts_at_once_where_blocks_lack(self, num_in_flight: int) -> None:
        engine = self.make_engine(20, num_in_flight=num_in_flight, chunk_size=64)
        low, high = self.low_requests(3, 90), make_request("high", [9] * 100, 20)
        engine.add(*low)
        while sum(len(request.block_table) for request in low) < 16:
            engine.step()
        engine.add(high)
        engine.step()
        engine.step()
        assert "high" in engine.first_scheduled
        assert engine.preempted
        engine.drain()
        self.assert_complete(engine, [*low, high])

    @OVERLAP
    def test_equals_never_give_way_to_each_other(self, num_in_flight: int) -> None:
        """Bug J5: 20 of equal priority, two slots."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=2), num_in_flight=num_in_flight)
        requests = [make_request(f"r{index}", [index] * 5, 30, priority=3) for index in range(20)]
        engine.add(*requests)
        engine.drain()
        assert engine.preempted == []
        self.assert_complete(engine, requests)

    @OVERLAP
    def test_nobody_is_displaced_over_and_over(self, num_in_flight: int) -> None:
        """Better requests keep coming, one at a time, with pauses in which a worse one can resume (F42)."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=1), num_in_flight=num_in_flight)
        low = self.low_requests(3, 40)
        engine.add(*low)
        for index in range(60):
            self._steps(engine, 4)
            engine.add(make_request(f"high{index}", [index % 50], 2))
        engine.drain()
        assert 0 < max(request.num_preemptions for request in low) <= self.max_preemptions
        self.assert_complete(engine, low)

    def _steps(self, engine: FakeEngine, count: int) -> None:
        for _ in range(count):
            engine.step()
