"""What a scheduler that shares places in time promises, as tests::

class TestMine(SchedulerContract, SliceContract):
    component = Mine
    settings = {"num_iterations": 6}
    num_iterations = 6
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import ClassVar

import pytest

from core.request import Request, RequestStatus
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks, SeenStep, seen_step


class Slices:
    """What each running request has had since it was admitted, seen from outside."""

    def __init__(self, num_iterations: int):
        self._num_iterations = num_iterations
        self._iterations: dict[Request, int] = {}
        self._tokens: dict[Request, int] = {}

    def take_in(self, step: SeenStep) -> None:
        for request in (*step.output.preempted, *step.admitted):
            self._iterations[request] = self._tokens[request] = 0
        for part in step.output.scheduled:
            self._iterations[part.request] = self._iterations.get(part.request, 0) + 1
            self._tokens[part.request] = self._tokens.get(part.request, 0) + part.samples

    def used_up(self, running: Iterable[Request]) -> list[Request]:
        """Those that have had their iterations, and a new token."""
        return [r for r in running if self._iterations.get(r, 0) >= self._num_iterations and self._tokens[r]]


class SliceContract(SchedulerChecks):
    """A request runs at most `num_iterations` steps in a row while another waits that fits in its place; a step more for each
    that its first new token takes."""

    num_iterations: ClassVar[int]
    """Steps in a row, under `settings`."""

    def check_step(self, slices: Slices, step: SeenStep) -> None:
        """Where blocks never lack: nobody waits on while one runs on whose slice is used up."""
        given_way = step.output.preempted
        waits = [request.request_id for request in step.passed if request not in given_way]
        runs_on = [r.request_id for r in slices.used_up(step.running) if r not in given_way]
        assert step.in_flight or not (waits and runs_on), f"{runs_on} run on while {waits} wait"
        slices.take_in(step)

    @OVERLAP
    @pytest.mark.parametrize("max_running", [1, 2, 5])
    def test_nobody_runs_on_while_others_wait(self, max_running: int, num_in_flight: int) -> None:
        rng = random.Random(max_running)
        limits = Limits(max_num_running_reqs=max_running)
        engine = self.make_engine(400, limits, num_in_flight=num_in_flight)
        requests = self.random_requests(rng, 40, max_tokens=60)
        slices, left = Slices(self.num_iterations), list(requests)
        while left or engine.requests:
            if left and rng.random() < 0.2:
                engine.add(left.pop())
            self.check_step(slices, seen_step(engine))
        engine.drain()
        assert engine.preempted, "they were meant to take turns"
        self.assert_complete(engine, requests)

    def test_a_slice_is_not_cut_short(self) -> None:
        engine = self.make_engine(400, Limits(max_num_running_reqs=1))
        requests = [make_request(f"r{index}", [index] * 5, 4 * self.num_iterations) for index in range(3)]
        engine.add(*requests)
        ran: list[str] = []
        while engine.requests:
            ran += [part.request.request_id for part in engine.step().scheduled]
        turns = [ran[start : start + self.num_iterations] for start in range(0, len(ran), self.num_iterations)]
        assert all(len(set(turn)) == 1 for turn in turns)
        assert [turn[0] for turn in turns] == ["r0", "r1", "r2"] * 4
        self.assert_complete(engine, requests)

    def test_whoever_runs_alone_is_not_interrupted(self) -> None:
        """Places are not left empty: with no more requests than places nobody gives way."""
        engine = self.make_engine(400, Limits(max_num_running_reqs=4))
        requests = [make_request(f"r{index}", [index] * 30, 8 * self.num_iterations) for index in range(4)]
        engine.add(*requests)
        engine.drain()
        assert engine.preempted == []
        self.assert_complete(engine, requests)

    def test_short_requests_wait_for_slices_and_not_for_ends(self) -> None:
        engine = self.make_engine(400, Limits(max_num_running_reqs=2))
        long = [make_request(f"long{index}", [index] * 5, 300) for index in range(4)]
        engine.add(*long)
        for _ in range(3 * self.num_iterations):
            engine.step()
        short = [make_request(f"short{index}", [9] * 5, 3) for index in range(4)]
        engine.add(*short)
        first = engine.num_steps
        while not all(request.is_finished for request in short):
            engine.step()
        # 4 waiting long ones and 4 short ones in two places: 4 turns, of which one has begun
        assert engine.num_steps - first <= 4 * self.num_iterations
        assert not any(request.is_finished for request in long)
        engine.drain()
        self.assert_complete(engine, [*long, *short])

    @OVERLAP
    @pytest.mark.parametrize("num_blocks", [14, 200])
    def test_long_prompts_make_progress(self, num_blocks: int, num_in_flight: int) -> None:
        """Prompts of far more chunks than a slice has steps, computed again in each turn."""
        limits = Limits(max_num_running_reqs=2)
        engine = self.make_engine(
            num_blocks, limits, num_in_flight=num_in_flight, chunk_size=7, prefix_caching=num_blocks > 14
        )
        requests = [make_request(f"r{index}", [index] * 180, 8) for index in range(5)]
        engine.add(*requests)
        engine.drain()
        self.assert_complete(engine, requests)


class TightSlices:
    """The promise in any pool: when nobody was admitted though a slice was used up, someone did not fit."""

    def __init__(self, num_iterations: int):
        self.slices = Slices(num_iterations)
        self._used_up: list[Request] = []
        self._num_blocks = 0

    def before_step(self, engine: FakeEngine) -> None:
        running = [r for r in engine.requests.values() if r.status is RequestStatus.RUNNING]
        self._used_up = self.slices.used_up(running)
        spare = len(running) + 1  # what a resumed request leaves free
        self._num_blocks = engine.cache.num_free_blocks + engine.cache.num_freed_by(self._used_up) - spare

    def after_step(self, engine: FakeEngine, step: SeenStep) -> None:
        is_clear = not (step.in_flight or step.output.preempted or step.admitted)
        if self._used_up and step.passed and is_clear:
            size = engine.cache.block_size
            needed = [-(-request.num_known_tokens // size) for request in step.passed]
            assert max(needed) > self._num_blocks, f"{self._used_up} run on, and all that wait fit"
        self.slices.take_in(step)
