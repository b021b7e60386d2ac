"""`priority` keeps the scheduler contract, its aging bound to the second, and never has two requests push each other out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.batch import SchedulerOutput
from core.request import FinishReason, Request, RequestStatus
from core.testing.fakes import Limits, make_request
from core.testing.priority_order import AgingContract, DisplacementContract
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.priority import ByLevel, Priority


def policy(**settings: object) -> ByLevel:
    return ByLevel(Priority.Settings.model_validate(settings))


def joined(by_level: ByLevel, *requests: Request) -> list[Request]:
    """In the order in which they stand in a queue."""
    for request in requests:
        by_level.joined(request)
    return sorted(requests, key=by_level.rank)


class TestPriority(SchedulerContract, AgingContract, DisplacementContract):
    component = Priority
    provides = frozenset({"drafts", "jump_forward"})
    settings = {"aging_s": 2.0, "deadline_s": 0.0}
    aging_s = 2.0

    def test_a_better_request_takes_the_place_of_the_one_that_is_due_last(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=3))
        engine.add(*(make_request(f"r{index}", [index], 30, priority=level) for index, level in enumerate((2, 3, 1))))
        engine.step()
        engine.add(make_request("best", [9], 4))
        assert [request.request_id for request in engine.step().preempted] == ["r1"]
        engine.drain()

    def test_an_aged_request_is_not_displaced_by_a_better_one(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        engine.add(make_request("old", [1], 30, priority=1))
        engine.step()
        engine.clock.advance(2.1)
        engine.add(make_request("better", [2], 4))
        engine.drain()
        assert engine.preempted == []

    def test_an_expired_request_makes_no_room_for_itself(self) -> None:
        """Expiry is the mechanism's: what comes too late is not scheduled, however good its level."""
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 30, priority=3))
        engine.step()
        late = make_request("late", [2], 4, priority=0, deadline=engine.clock() + 0.5)
        engine.clock.advance(1.0)
        engine.add(late)
        engine.drain()
        assert (late.finish_reason, engine.preempted) == (FinishReason.EXPIRED, [])


class TestStrictPriority(SchedulerContract, DisplacementContract):
    component = Priority
    provides = frozenset({"drafts", "jump_forward"})
    settings = {"aging_s": None}

    def test_waiting_counts_for_nothing(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 5))
        engine.step()
        engine.add(make_request("worse", [2], 4, priority=1))
        engine.clock.advance(1e6)
        engine.add(make_request("better", [3], 4))
        engine.drain()
        assert engine.first_scheduled == ["runs", "better", "worse"]


LEVELS = st.integers(-3, 3)
SECONDS = st.floats(0, 1e5, allow_nan=False).map(lambda seconds: round(seconds, 3))


class TestRank:
    @given(LEVELS, LEVELS, SECONDS, SECONDS, st.sampled_from([0.5, 30.0, 600.0]))
    def test_the_bound(self, level: int, better: int, arrival: float, later: float, aging_s: float) -> None:
        """Overtaken by one that came `later` seconds after exactly where the levels between them are worth more."""
        first = make_request("first", [1], priority=level, arrival_time=arrival)
        second = make_request("second", [1], priority=better, arrival_time=arrival + later)
        bound = (level - better) * aging_s
        order = joined(policy(aging_s=aging_s, deadline_s=0.1), first, second)
        if abs(later - bound) > 1e-6:
            assert (order[0] is second) == (later < bound)

    @given(
        st.lists(st.tuples(LEVELS, SECONDS, st.none() | st.floats(0, 60)), min_size=2, max_size=6),
        st.sampled_from([0.0, 5.0]),
    )
    def test_deadlines_widen_the_bound_by_their_worth(
        self, asked: list[tuple[int, float, float | None]], deadline_s: float
    ) -> None:
        requests = [
            make_request(f"r{i}", [1], priority=level, arrival_time=at, deadline=None if ttl is None else at + ttl)
            for i, (level, at, ttl) in enumerate(asked)
        ]
        order = joined(policy(aging_s=10.0, deadline_s=deadline_s), *requests)
        for place, request in enumerate(order):
            for overtaken in order[place + 1 :]:
                later = request.arrival_time - overtaken.arrival_time
                assert later <= (overtaken.priority - request.priority) * 10.0 + deadline_s + 1e-6

    @pytest.mark.parametrize("aging_s", [30.0, None])
    def test_among_equals_the_earlier_deadline_is_first(self, aging_s: float | None) -> None:
        none = make_request("none", [1], arrival_time=100.0)
        soon = make_request("soon", [1], arrival_time=101.0, deadline=103.0)
        sooner = make_request("sooner", [1], arrival_time=101.5, deadline=102.0)
        far = make_request("far", [1], arrival_time=102.0, deadline=500.0)
        order = joined(policy(aging_s=aging_s), none, soon, sooner, far)
        assert [request.request_id for request in order] == ["sooner", "soon", "none", "far"]

    def test_a_deadline_is_worth_less_than_a_level(self) -> None:
        worse = make_request("worse", [1], priority=1, arrival_time=100.0, deadline=100.0)
        better = make_request("better", [1], arrival_time=100.0)
        assert joined(policy(), worse, better) == [better, worse]
        with pytest.raises(ValidationError, match="a deadline would count for more than a level"):
            policy(aging_s=5.0, deadline_s=5.0)

    def test_a_past_deadline_brings_no_more_forward_than_arrival(self) -> None:
        a = make_request("a", [1], arrival_time=100.0, deadline=1.0)
        b = make_request("b", [1], arrival_time=99.0, deadline=99.0)
        assert joined(policy(), a, b) == [b, a]


class TestTiers:
    tiers = {"gold": {"tenants": ["acme", "umbra"], "level": -20}, "bulk": {"tenants": ["crawler"], "level": 20}}

    def test_the_tier_and_the_request_make_the_level(self) -> None:
        by_level = policy(tiers=self.tiers, default_level=3, aging_s=None)
        levels = {
            ("acme", 0): -20,
            ("umbra", 5): -15,
            ("crawler", -1): 19,
            ("", 0): 3,
            ("other", 2): 5,
            ("crawler", -(10**9)): 12,  # a client cannot leave its tier
            ("acme", 10**9): -12,
        }
        for (tenant, priority), level in levels.items():
            request = make_request("r", [1], tenant=tenant, priority=priority)
            by_level.joined(request)
            assert by_level.rank(request)[0] == level
            by_level.left(request)

    def test_a_tenant_in_two_tiers_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="is in gold and bulk; keep it in one"):
            policy(tiers={"gold": {"tenants": ["a"], "level": 0}, "bulk": {"tenants": ["a"], "level": 1}})


class TestDisplacement:
    def run(self, by_level: ByLevel, *requests: Request) -> list[Request]:
        for request in requests:
            by_level.joined(request)
            request.status = RequestStatus.RUNNING
        return sorted(requests, key=by_level.rank)

    def test_only_worse_levels_that_are_due_later(self) -> None:
        by_level = policy(aging_s=10.0, deadline_s=0.0)
        equal = make_request("equal", [1], priority=1, arrival_time=130.0)
        aged = make_request("aged", [1], priority=3, arrival_time=70.0)
        worse = make_request("worse", [1], priority=2, arrival_time=100.0)
        worst = make_request("worst", [1], priority=4, arrival_time=90.0)
        spared = make_request("spared", [1], priority=4, arrival_time=99.0, num_preemptions=2)
        running = self.run(by_level, equal, aged, worse, worst, spared)
        head = make_request("head", [1], priority=1, arrival_time=105.0)
        by_level.joined(head)
        assert list(by_level.displaced_by(head, running)) == [worst, worse]

    @pytest.mark.parametrize("seed", range(4))
    def test_a_burst_finds_the_same_victims_as_each_of_it_alone(self, seed: int) -> None:
        """Levels, ages and sizes by chance: what is kept from one head for the next is what would be found anew."""
        rng, asked = random.Random(seed), [0]
        engine = TestPriority().make_engine(30, Limits(max_num_running_reqs=8))
        by_level = engine.scheduler._policy  # type: ignore[attr-defined]
        kept = by_level.displaced_by

        def compared(head: Request, running: list[Request]) -> list[Request]:
            level, rank = by_level._levels[head.request_id], by_level._ranks[head.request_id]
            found = [one for one in kept(head, running) if one.status is RequestStatus.RUNNING]
            assert found == list(by_level._worse(level, rank, running))
            asked[0] += len(found) > 1
            return found

        by_level.displaced_by = compared
        for turn in range(12):
            names = [f"{turn}-{index}" for index in range(rng.randint(0, 8))]
            engine.add(*[make_request(n, [1] * rng.randint(1, 60), 12, priority=rng.randint(-4, 4)) for n in names])
            for _ in range(rng.randint(1, 6)):
                engine.step()
        engine.drain()
        assert asked[0] > 10 and len(engine.preempted) > 5

    def test_what_has_left_is_forgotten(self) -> None:
        by_level = policy()
        request = make_request("r", [1])
        by_level.joined(request)
        by_level.left(request)
        assert not by_level._ranks and not by_level._levels


class PriorityMachine(SchedulerMachine):
    checks = TestPriority
    deadlines = False

    def after_step(self, output: SchedulerOutput) -> None:
        TestPriority().check_step(self.seen)
        for request in output.preempted:
            assert request.status is not RequestStatus.RUNNING


class DeadlineMachine(PriorityMachine):
    """With deadlines, which may widen the bound by what they are worth."""

    class checks(TestPriority):
        settings = {"aging_s": 2.0, "deadline_s": 0.5}

    deadlines = True

    def after_step(self, output: SchedulerOutput) -> None:
        TestPriority().check_step(self.seen, slack_s=0.5)


TestPriorityMachine = machine_test(PriorityMachine)
TestDeadlineMachine = machine_test(DeadlineMachine, max_examples=30)
