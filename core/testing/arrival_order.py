"""The promise of first come, first served, as tests::

class TestMine(SchedulerContract, ArrivalOrderContract):
    component = Mine
"""

from __future__ import annotations

import random

import pytest

from core.testing.fakes import FakeEngine, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks


class ArrivalOrderContract(SchedulerChecks):
    """For schedulers that promise first come, first served."""

    @OVERLAP
    @pytest.mark.parametrize("num_blocks", [9, 14, 60])
    def test_first_scheduled_in_order_of_arrival(self, num_blocks: int, num_in_flight: int) -> None:
        rng = random.Random(num_blocks)
        engine = self.make_engine(num_blocks, num_in_flight=num_in_flight)
        requests = self.random_requests(rng, 24)
        for request in requests:
            engine.add(request)
            if rng.random() < 0.3:
                engine.step()
        engine.drain()
        assert engine.first_scheduled == [request.request_id for request in requests]

    @OVERLAP
    def test_few_preemptions_in_a_pool_that_is_too_small(self, num_in_flight: int) -> None:
        """KV for 2.5 sequences, 8 requests of 200 tokens."""
        engine = self.make_engine(34, num_in_flight=num_in_flight)
        requests = [make_request(f"r{index}", [index] * 10, 200, seed=index) for index in range(8)]
        engine.add(*requests)
        engine.drain()
        assert max(request.num_preemptions for request in requests) <= 8

    @OVERLAP
    def test_no_older_request_is_preempted_while_a_younger_one_keeps_its_blocks(self, num_in_flight: int) -> None:
        """A preempted request keeps its place before all newcomers, also under steady arrival (bug J6)."""
        rng = random.Random(6)
        engine = self.make_engine(14, num_in_flight=num_in_flight, prefix_caching=False)
        requests = [make_request(f"r{index:02}", [rng.randrange(50)] * 20, 60, seed=index) for index in range(24)]
        for request in requests:
            engine.add(request)
            for _ in range(8):
                self._check_preempted_are_youngest(engine)
        while engine.requests:
            self._check_preempted_are_youngest(engine)
        assert engine.preempted
        assert list(engine.ended) == sorted(engine.ended)  # equal lengths: oldest ends first
        assert max(request.num_preemptions for request in requests) <= 4
        self.assert_complete(engine, requests)

    def _check_preempted_are_youngest(self, engine: FakeEngine) -> None:
        engine.step()
        running = [name for name, request in engine.requests.items() if request.block_table]
        preempted = [n for n, r in engine.requests.items() if r.num_preemptions and not r.block_table]
        assert not running or not preempted or max(running) < min(preempted)
