"""The promise of schedulers that try the longest cached prefix first, as tests::

class TestMine(SchedulerContract, PrefixFirstContract):
    component = Mine
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from core.request import Request
from core.testing.fake_loop import BLOCK_SIZE
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks

HEAD = [index % 50 for index in range(6 * BLOCK_SIZE)]


class PrefixFirstContract(SchedulerChecks):
    """One slot, so that the order of admissions is the order of the policy."""

    max_wait_s: ClassVar[float] = 1.0  # as set: whoever has waited so long goes first

    def one_slot(self, num_in_flight: int = 0) -> FakeEngine:
        """A request of the empty tenant has computed `HEAD`, and one that takes 20 steps runs."""
        engine = self.make_engine(200, Limits(512, 1), chunk_size=512, num_in_flight=num_in_flight)
        engine.add(make_request("warm", [*HEAD, 1], 1))
        engine.drain()
        engine.add(make_request("busy", [2] * 5, 20))
        engine.step()
        return engine

    def prompt(self, name: str, num_cached_blocks: int, **fields: str) -> Request:
        """Nobody else has its tail."""
        tail = [*name.encode(), *[7] * 20]
        return make_request(name, [*HEAD[: num_cached_blocks * BLOCK_SIZE], *(t % 50 for t in tail)], 2, **fields)

    @OVERLAP
    def test_longest_cached_prefix_first_then_by_arrival(self, num_in_flight: int) -> None:
        engine = self.one_slot(num_in_flight)
        cached = {"none": 0, "two": 2, "five": 5, "another two": 2, "six": 6}
        engine.add(*[self.prompt(name, count) for name, count in cached.items()])
        engine.add(self.prompt("stranger", 6, tenant="other"))  # the same tokens, and nothing it may use
        engine.drain()
        assert engine.first_scheduled[2:] == ["six", "five", "two", "another two", "none", "stranger"]
        for name, count in cached.items():
            assert engine.ended[name].num_cached_tokens == count * BLOCK_SIZE

    @OVERLAP
    def test_who_has_waited_long_enough_waits_for_nobody_that_came_later(self, num_in_flight: int) -> None:
        """A prompt without a prefix under a stream of others with one: the bound holds, and is not beaten by much."""
        engine = self.one_slot(num_in_flight)
        lonely = self.prompt("lonely", 0)
        engine.add(lonely)
        came, start = {"lonely": engine.clock()}, engine.clock()
        while engine.clock() < start + 3 * self.max_wait_s + 1:
            while len(engine.requests) < 4:
                name = f"r{len(came)}"
                came[name] = engine.clock()
                engine.add(self.prompt(name, 4))
            engine.step()
        order = engine.first_scheduled[2:]
        before = order[: order.index("lonely")]
        assert before, "others had a prefix and went first"
        assert max(came[name] for name in before) <= came["lonely"] + self.max_wait_s + 2 * engine.step_s
        engine.abort(*engine.requests)
        engine.drain()

    @pytest.mark.parametrize("num_blocks", [9, 14])
    def test_nothing_is_lost_in_a_small_pool(self, num_blocks: int) -> None:
        """What was promised as cached may be evicted before its turn."""
        engine = self.make_engine(num_blocks)
        requests = [self.prompt(f"r{index}", index % 6) for index in range(24)]
        for request in requests:
            engine.add(request)
            engine.step()
        engine.drain()
        self.assert_complete(engine, requests)
