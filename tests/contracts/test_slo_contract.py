"""`slo` keeps the scheduler contract and the order of deadlines; late requests yield, and none starves."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from core.batch import ScheduledRequest, SchedulerOutput
from core.request import Request, RequestStatus
from core.testing.deadline_order import DeadlineContract, DeadlineWatch
from core.testing.fakes import FakeClock, Limits, make_request
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.slo import EarliestDeadline, Slo


class TestSlo(SchedulerContract, DeadlineContract):
    component = Slo
    provides = frozenset({"drafts", "jump_forward"})
    settings = {"ttft_s": 0.5, "tpot_s": 0.05, "late_every": 3}
    ttft_s = 0.5
    late_every = 3
    lead_s = 0.2

    def test_a_late_request_gives_way_to_one_in_time(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        late = make_request("late", [1], 40, arrival_time=engine.clock() - 1.0)
        engine.add(late)
        engine.step()
        engine.add(make_request("in time", [2], 4))
        assert engine.step().preempted == (late,)
        engine.drain()
        self.assert_complete(engine, [late])

    def test_a_request_in_time_is_not_displaced(self) -> None:
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        engine.add(make_request("runs", [1], 40))
        engine.step()
        urgent = make_request("urgent", [2], 4, deadline=engine.clock() + 1e-3)
        engine.add(urgent)
        engine.drain()
        assert engine.preempted == []

    def test_late_requests_end_under_a_load_that_never_lets_up(self) -> None:
        """Displaced twice at most, then it keeps its slot."""
        engine = self.make_engine(limits=Limits(max_num_running_reqs=1))
        late = [make_request(f"late{index}", [index], 30, arrival_time=engine.clock() - 1.0) for index in range(3)]
        engine.add(*late)
        for index in range(300):
            engine.add(make_request(f"r{index}", [index % 50], 2))
            engine.step()
            engine.step()
        assert all(request.is_finished and request.num_preemptions <= 2 for request in late)
        engine.drain()

    def test_more_in_time_than_first_come_first_served(self) -> None:
        """1.25 times the load that two slots carry: whoever waits in order of arrival is soon late, and all after it."""
        in_time = {}
        for name, settings in {"slo": self.settings, "patient": {**self.settings, "ttft_s": 1e6}}.items():
            checks = TestSlo()
            checks.settings = settings  # type: ignore[misc]
            engine = checks.make_engine(200, Limits(max_num_running_reqs=2))
            requests = [make_request(f"r{index}", [index % 50] * 4, 10) for index in range(200)]
            for request in requests:
                engine.add(request)
                for _ in range(4):
                    engine.step()
            engine.drain()
            first_tokens = [r.first_scheduled_time + engine.step_s - r.arrival_time for r in requests]
            in_time[name] = sum(seconds < 0.5 + 1e-6 for seconds in first_tokens)
        assert in_time["slo"] > 0.6 * len(requests) > 1.5 * in_time["patient"]


def policy(clock: FakeClock, **settings: object) -> EarliestDeadline:
    values = {"ttft_s": 1.0, "tpot_s": 0.1, "late_every": 3, **settings}
    return EarliestDeadline(Slo.Settings.model_validate(values), clock)


def names(requests: object) -> str:
    return "".join(request.request_id for request in requests)  # type: ignore[attr-defined]


def queue(by_deadline: EarliestDeadline, *requests: Request) -> list[Request]:
    for request in requests:
        by_deadline.joined(request)
    return sorted(requests, key=by_deadline.rank)


class TestEarliestDeadline:
    def test_order(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        waiting = queue(
            by_deadline,
            make_request("c", [1], arrival_time=99.9),
            make_request("a", [1], arrival_time=99.95, deadline=100.2),
            make_request("b", [1], arrival_time=99.5),
            make_request("y", [1], arrival_time=98.5),
            make_request("x", [1], arrival_time=97.0),
        )
        assert names(by_deadline.waiting_order(waiting)) == "abcxy"

    def test_late_ones_take_turns_with_the_others(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        late = [make_request(name, [1], arrival_time=90.0 + index) for index, name in enumerate("xyz")]
        in_time = [make_request(name, [1], arrival_time=99.5 + index / 100) for index, name in enumerate("abcdef")]
        order = []
        for request in by_deadline.waiting_order(queue(by_deadline, *late, *in_time)):
            order.append(request)
            request.status = RequestStatus.RUNNING
            by_deadline.started(request)
        assert names(order) == "abxcdyefz"

    def test_a_request_without_room_does_not_count_as_admitted(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        waiting = queue(by_deadline, *(make_request(name, [1], arrival_time=99.5) for name in "abcd"))
        waiting = queue(by_deadline, make_request("x", [1], arrival_time=90.0), *waiting)
        assert names(by_deadline.waiting_order(waiting)) == names(by_deadline.waiting_order(waiting)) == "abcdx"

    def test_a_preempted_request_is_due_by_its_tokens(self) -> None:
        """First token at 100.0, 4 tokens: the next is due at 100.4, between two that are due at 100.3 and at 100.5."""
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        request = make_request("p", [1], arrival_time=99.5)
        by_deadline.joined(request)
        by_deadline.started(request)
        request.append_output([1])
        by_deadline.planned(SchedulerOutput(1, (ScheduledRequest(request, 1, 1),)))
        clock.advance(0.1)
        request.append_output([2, 3, 4])
        request.status = RequestStatus.PREEMPTED
        others = [make_request("a", [1], arrival_time=99.3), make_request("b", [1], arrival_time=99.5)]
        waiting = queue(by_deadline, request, *others)
        assert names(by_deadline.waiting_order(waiting)) == "apb"
        clock.advance(0.6)  # all are overdue; what has begun in time can make up for it
        assert names(by_deadline.waiting_order(waiting)) == "pab"

    def test_a_first_token_that_came_too_late_is_late_for_good(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        request, head = make_request("r", [1], arrival_time=98.0), make_request("h", [1], arrival_time=99.9)
        (head,) = by_deadline.waiting_order(queue(by_deadline, head))
        by_deadline.joined(request)
        by_deadline.started(request)
        assert by_deadline.displaced_by(head, [request]) == [request]
        request.append_output([1])
        by_deadline.planned(SchedulerOutput(1, (ScheduledRequest(request, 1, 1),)))
        assert by_deadline.displaced_by(head, [request]) == [request]
        request.status, request.num_preemptions = RequestStatus.PREEMPTED, 2
        assert by_deadline.displaced_by(head, [request]) == []
        assert names(by_deadline.waiting_order(queue(by_deadline, request, head))) == "hr"

    def test_what_a_failed_scheduler_had_begun_is_in_time(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock)
        begun = make_request("b", [1], arrival_time=90.0, output_token_ids=[1, 2])
        waiting = queue(by_deadline, begun, make_request("a", [1], arrival_time=99.5))
        assert names(by_deadline.waiting_order(waiting)) == "ba"

    def test_tiers_have_targets_of_their_own(self) -> None:
        clock = FakeClock(100.0)
        by_deadline = policy(clock, tiers={"gold": {"tenants": ["acme"], "ttft_s": 0.2}})
        waiting = queue(
            by_deadline,
            make_request("b", [1], arrival_time=99.5),
            make_request("a", [1], arrival_time=99.9, tenant="acme"),
        )
        assert names(by_deadline.waiting_order(waiting)) == "ab"
        with pytest.raises(ValidationError, match="is in gold and bulk; keep it in one"):
            policy(clock, tiers={"gold": {"tenants": ["a"]}, "bulk": {"tenants": ["a"]}})

    def test_what_has_left_is_forgotten(self) -> None:
        by_deadline = policy(FakeClock())
        request = make_request("r", [1], output_token_ids=[1])
        by_deadline.joined(request)
        by_deadline.left(request)
        assert not by_deadline._ranks and not by_deadline._first_times


class SloMachine(SchedulerMachine):
    checks = TestSlo

    def __init__(self) -> None:
        super().__init__()
        self.watch = DeadlineWatch(TestSlo())

    def after_recovery(self) -> None:
        self.watch = DeadlineWatch(TestSlo())

    def after_step(self, output: SchedulerOutput) -> None:
        self.watch.take_in(self.seen)


TestSloMachine = machine_test(SloMachine)
