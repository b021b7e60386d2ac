"""`prefix_aware` keeps the scheduler contract; it asks the cache for a bounded number of prefixes, and seldom twice."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from core.batch import SchedulerOutput
from core.request import Request
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.prefix_first import PrefixFirstContract
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_checks import SchedulerChecks
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.prefix_aware import PrefixAware


def count_peeks(engine: FakeEngine) -> Counter[str]:
    """By request id, from now on."""
    peeks: Counter[str] = Counter()
    peek = engine.cache.peek

    def counted(request: Request) -> int:
        peeks[request.request_id] += 1
        return peek(request)

    engine.cache.peek = counted  # type: ignore[method-assign]
    return peeks


class TestPrefixAware(SchedulerContract, PrefixFirstContract):
    component = PrefixAware
    provides = frozenset({"drafts", "jump_forward"})
    settings = {"max_wait_s": 1.0}

    def test_a_step_asks_for_no_more_prefixes_than_the_window(self) -> None:
        engine = self.one_slot()
        peeks = count_peeks(engine)
        engine.add(*[self.prompt(f"r{index}", index % 4) for index in range(200)])
        while len(engine.ended) < 20:
            before = peeks.total()
            engine.step()
            assert peeks.total() - before <= 32
        assert len(peeks) <= 32 + 20
        engine.abort(*engine.requests)
        engine.drain()

    def test_an_answer_is_kept_for_some_steps_and_not_for_ever(self) -> None:
        """The head does not fit while `holder` runs, and is asked for in each step."""
        engine = self.make_engine(12, Limits(200, 8), chunk_size=200)
        holder = make_request("holder", [1] * 100, 60)
        engine.add(holder)
        engine.step()
        peeks = count_peeks(engine)
        engine.add(*[make_request(f"r{index}", [index] * 90, 2) for index in range(2, 7)])
        num_steps = 0
        while not holder.is_finished:
            engine.step()
            num_steps += 1
        assert peeks.total() <= 5 * (num_steps // 16 + 1)
        assert min(peeks.values()) >= num_steps // 20
        engine.drain()

    def test_those_behind_the_window_are_not_compared_with_those_in_it(self) -> None:
        """Two at a time: the next in line comes in for the one that goes."""
        engine = SmallWindow().one_slot()
        engine.add(*[self.prompt(name, count) for name, count in {"a": 0, "b": 1, "c": 6, "d": 2, "e": 5}.items()])
        engine.drain()
        assert engine.first_scheduled[2:] == ["b", "c", "d", "e", "a"]

    def test_a_preempted_request_comes_before_the_others(self) -> None:
        """What it has computed would be evicted for them. `max_wait_s` plays no part in this."""
        engine = self.make_engine(13, Limits(200, 8), chunk_size=200)
        requests = [make_request(f"r{index}", [index] * 60, 60) for index in range(4)]
        engine.add(*requests)
        while not engine.preempted:
            engine.step()
        waiting = engine.scheduler._policy.waiting_order(engine.scheduler._queues.waiting)  # type: ignore[attr-defined]
        assert next(iter(waiting)).request_id == engine.preempted[0]
        engine.drain()
        self.assert_complete(engine, requests)

    def test_who_is_added_anew_after_a_recovery_has_waited_all_the_same(self) -> None:
        """`max_wait_s` is 1, and the clock of a scheduler made anew says nothing of how long a request has waited."""
        engine = self.one_slot()
        now = engine.clock()
        old = self.prompt("old", 0)
        old.arrival_time = now - 0.9
        engine.add(old, self.prompt("new", 6))
        engine.step()
        order = self.waiting(engine)
        assert order == ["new", "old"]
        engine.clock.advance(0.2)  # type: ignore[attr-defined]
        assert self.waiting(engine) == ["old", "new"]
        engine.drain()

    def test_the_order_of_waits_is_that_of_adding(self) -> None:
        """A front may say of a later one that it came earlier: it was rendered for longer."""
        engine = self.one_slot()
        first, second = self.prompt("first", 0), self.prompt("second", 0)
        first.arrival_time, second.arrival_time = engine.clock() - 0.2, engine.clock() - 5.0
        engine.add(first, second, self.prompt("cached", 6))
        assert self.waiting(engine) == ["cached", "first", "second"]
        engine.clock.advance(0.9)  # type: ignore[attr-defined]
        assert self.waiting(engine) == ["first", "second", "cached"]
        engine.drain()

    def waiting(self, engine: FakeEngine) -> list[str]:
        scheduler = engine.scheduler
        order = scheduler._policy.waiting_order(scheduler._queues.waiting)  # type: ignore[attr-defined]
        return [request.request_id for request in order]

    def test_settings_are_refused_with_the_field_named(self) -> None:
        for name, value in {"window": 0, "max_wait_s": -1, "memory_steps": 0}.items():
            with pytest.raises(ValidationError, match=name):
                PrefixAware.Settings.model_validate({name: value})


class SmallWindow(PrefixFirstContract):
    component = PrefixAware
    settings = {"window": 2}


class AtOnce(SchedulerChecks):
    component = PrefixAware
    provides = frozenset({"drafts", "jump_forward"})
    settings = {"window": 3, "max_wait_s": 0.2, "memory_steps": 2}


class PrefixAwareMachine(SchedulerMachine):
    """Whoever has waited for `max_wait_s` is passed by nobody who came later."""

    checks = AtOnce

    def after_step(self, output: SchedulerOutput) -> None:
        waits = self.engine.scheduler._policy._waits  # type: ignore[attr-defined]
        assert waits.keys() == self.engine.requests.keys()
        now = self.engine.clock() - self.engine.step_s
        started = [
            waits[part.request.request_id].since
            for part in output.scheduled
            if part.request.first_scheduled_time == now and part.request.request_id in waits
        ]
        waiting = [
            waits[request.request_id].since
            for request in self.engine.requests.values()
            if request.first_scheduled_time is None and not self.held_back(request)
        ]
        overdue = [since for since in waiting if since <= now - 0.2]
        assert not started or not overdue or max(started) <= min(overdue) or max(started) <= now - 0.2


TestPrefixAwareMachine = machine_test(PrefixAwareMachine)
