"""`time_slice` keeps the scheduler contract and its slices, in roomy pools and in tiny ones."""

from __future__ import annotations

import pytest

from core.batch import ScheduledRequest, SchedulerOutput
from core.request import Request, RequestStatus
from core.testing.fakes import Limits, make_request
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from core.testing.time_slices import SliceContract, TightSlices
from plugins.schedulers.time_slice import RoundRobin, TimeSlice


class TestTimeSlice(SchedulerContract, SliceContract):
    component = TimeSlice
    provides = frozenset({"drafts", "jump_forward"})
    num_iterations = 10

    @pytest.mark.parametrize("min_tokens", [1, 4])
    def test_each_turn_brings_its_tokens(self, min_tokens: int) -> None:
        """Prompts of 12 chunks against slices of 3 steps; nothing is cached, so each turn computes the whole prompt again."""
        limits = Limits(max_num_running_reqs=1)
        checks = TestTimeSlice()
        checks.settings = {"num_iterations": 3, "min_tokens": min_tokens}  # type: ignore[misc]
        engine = checks.make_engine(200, limits, chunk_size=10, prefix_caching=False)
        requests = [make_request(f"r{index}", [index] * 120, 9) for index in range(3)]
        engine.add(*requests)
        had = dict.fromkeys(requests, 0)
        while engine.requests:
            for request in engine.step().preempted:
                assert request.num_output_tokens - had[request] == min_tokens
                had[request] = request.num_output_tokens
        assert {request.num_preemptions for request in requests} == {8 // min_tokens}
        self.assert_complete(engine, requests)

    def test_whoever_lacks_blocks_keeps_its_place(self) -> None:
        """Preempted before its slice was used up: first of the waiting, not last."""
        checks = TestTimeSlice()
        checks.settings = {"num_iterations": 500}  # type: ignore[misc]
        engine = checks.make_engine(8, chunk_size=64, prefix_caching=False)
        first, second = make_request("first", [1] * 60, 60), make_request("second", [2] * 50, 30)
        engine.add(first, second)
        while not engine.preempted:
            engine.step()
        third = make_request("third", [3] * 8, 4)
        engine.add(third)
        engine.drain()
        assert engine.preempted == ["second"]
        assert list(engine.ended) == ["first", "second", "third"] or engine.first_scheduled[-1] == "third"
        self.assert_complete(engine, [first, second, third])


class TestOtherSlices(SliceContract):
    component = TimeSlice
    settings = {"num_iterations": 3}
    num_iterations = 3


def ran(policy: RoundRobin, *requests: Request, steps: int = 1) -> None:
    for _ in range(steps):
        policy.planned(SchedulerOutput(1, tuple(ScheduledRequest(request, 0, 1) for request in requests)))


class TestRoundRobin:
    def test_turns(self) -> None:
        policy = RoundRobin(num_iterations=2, min_tokens=1)
        a, b = requests = [make_request(name, [1]) for name in "ab"]
        for request in requests:
            policy.joined(request)
        assert policy.rank(a) < policy.rank(b)
        policy.started(a)
        a.status = RequestStatus.RUNNING
        ran(policy, a, steps=3)
        assert not policy.displaced_by(b, [a])  # a prompt in chunks: no token yet
        a.append_output([5])
        assert policy.displaced_by(b, [a]) == [a]
        a.status = RequestStatus.PREEMPTED
        policy.joined(a)
        assert policy.rank(b) < policy.rank(a)

    def test_ids_in_flight_count(self) -> None:
        policy = RoundRobin(num_iterations=1, min_tokens=2)
        request = make_request("a", [1], output_token_ids=[3])
        policy.joined(request)
        policy.started(request)
        ran(policy, request)
        request.num_pending_tokens = 1
        assert not policy.displaced_by(make_request("b", [1]), [request])
        request.num_pending_tokens = 2
        assert policy.displaced_by(make_request("b", [1]), [request]) == [request]

    def test_what_has_left_is_forgotten(self) -> None:
        policy = RoundRobin(1, 1)
        request = make_request("a", [1])
        policy.joined(request)
        policy.left(request)
        assert not policy._turns


class TimeSliceMachine(SchedulerMachine):
    class checks(TestTimeSlice):
        settings = {"num_iterations": 4}

    def __init__(self) -> None:
        super().__init__()
        self.slices = TightSlices(4)

    def before_step(self) -> None:
        self.slices.before_step(self.engine)

    def after_step(self, output: SchedulerOutput) -> None:
        # Where a prompt must fit what a step has left, or stage 5 holds it back, room alone is not enough.
        if not self.options["whole"] and not self.options["chunked"]:
            self.slices.after_step(self.engine, self.seen)


TestTimeSliceMachine = machine_test(TimeSliceMachine)
