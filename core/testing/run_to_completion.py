"""The promise of schedulers that run batch after batch, each to its end, as tests::

class TestMine(SchedulerContract, RunToCompletionContract):
    component = Mine
"""

from __future__ import annotations

import random

import pytest

from core.request import Request
from core.testing.fake_loop import BLOCK_SIZE
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks


class Batches:
    """Who ran together. Checks in each step that nobody joins a batch of which one has ended, and nobody is preempted."""

    def __init__(self, engine: FakeEngine):
        self._engine = engine
        self._members: dict[str, Request] = {}  # of the batch that runs
        self._is_complete = False  # one of it has ended
        self.all: list[list[str]] = []

    def step(self) -> None:
        output = self._engine.step()
        assert not output.preempted
        self._is_complete = self._is_complete or any(request.is_finished for request in self._members.values())
        for part in output.scheduled:
            name = part.request.request_id
            if name in self._members:
                continue
            if all(request.is_finished for request in self._members.values()):
                self._members, self._is_complete = {}, False
                self.all.append([])
            assert not self._is_complete, f"{name} joined a batch of which one had ended"
            self._members[name] = part.request
            self.all[-1].append(name)

    def drain(self) -> None:
        while self._engine.requests:
            self.step()
        self._engine.drain()


class RunToCompletionContract(SchedulerChecks):
    @OVERLAP
    @pytest.mark.parametrize("num_blocks", [9, 30, 200])
    def test_nobody_joins_a_batch_and_nobody_is_preempted(self, num_blocks: int, num_in_flight: int) -> None:
        rng = random.Random(num_blocks)
        engine = self.make_engine(num_blocks, num_in_flight=num_in_flight)
        requests, batches = self.random_requests(rng, 30), Batches(engine)
        for request in requests:
            engine.add(request)
            for _ in range(rng.randrange(4)):
                batches.step()
        batches.drain()
        assert [name for batch in batches.all for name in batch] == [request.request_id for request in requests]
        assert num_blocks < 200 or max(map(len, batches.all)) > 1
        self.assert_complete(engine, requests)

    def test_blocks_for_all_its_tokens_are_its_own_from_the_start(self) -> None:
        """The waste that paging does away with: 100 positions each, of which few are used."""
        engine = self.make_engine(64, Limits(512, 8), chunk_size=512, prefix_caching=False)
        requests = [make_request(f"r{index}", [index] * 10, 90) for index in range(12)]
        engine.add(*requests)
        engine.step()
        tables = [request.block_table for request in requests if request.block_table]
        assert [len(table) for table in tables] == [-(-99 // BLOCK_SIZE)] * 8
        while not requests[0].is_finished:
            engine.step()
            assert engine.cache.num_free_blocks in (64 - 8 * 7, 64)
        engine.drain()
        self.assert_complete(engine, requests)
