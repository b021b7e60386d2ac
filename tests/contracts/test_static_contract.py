"""`static` keeps the scheduler contract and runs batch after batch; a fixed batch waits for its requests, not for ever."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from core.batch import SchedulerOutput
from core.request import FinishReason
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.fakes import Limits, make_request
from core.testing.run_to_completion import Batches, RunToCompletionContract
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_checks import SchedulerChecks
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.static import Static

DRAFTS = frozenset({"drafts", "jump_forward"})


class TestStatic(SchedulerContract, RunToCompletionContract):
    component = Static
    provides = DRAFTS

    def test_a_long_request_keeps_the_slots_of_those_that_have_ended(self) -> None:
        """What continuous batching does away with."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=4))
        batches = Batches(engine)
        engine.add(*[make_request(f"r{i}", [i] * 5, 40 if i == 1 else 4) for i in range(8)])
        while len(engine.ended) < 4:
            batches.step()
        assert set(engine.ended) == {"r0", "r1", "r2", "r3"}
        batches.drain()
        assert [len(batch) for batch in batches.all] == [4, 4]

    def test_a_batch_may_take_some_steps_to_start(self) -> None:
        """Its prompts are more than the tokens of a step."""
        engine = self.make_engine(200, Limits(max_num_scheduled_tokens=32, max_num_running_reqs=4), chunk_size=32)
        batches = Batches(engine)
        requests = [make_request(f"r{i}", [i] * 40, 20) for i in range(8)]
        engine.add(*requests)
        batches.drain()
        assert batches.all == [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"]]
        self.assert_complete(engine, requests)

    def test_one_that_can_never_run_holds_up_nobody(self) -> None:
        engine = self.make_engine(8)
        bad = [make_request("empty", []), make_request("long", [1] * 500)]
        good = [make_request(f"r{i}", [i] * 20, 20) for i in range(3)]
        engine.add(good[0], bad[0], good[1], bad[1], good[2])
        engine.drain()
        assert {request.finish_reason for request in bad} == {FinishReason.ERROR}
        self.assert_complete(engine, good)


class TestFixedBatch(SchedulerContract, RunToCompletionContract):
    """Batches of two, for which no step is waited: whoever is there."""

    component = Static
    provides = DRAFTS
    settings = {"batch_size": 2, "max_wait_s": 0}

    def test_blocks_for_all_its_tokens_are_its_own_from_the_start(self) -> None:
        engine = self.make_engine(64)
        requests = [make_request(f"r{index}", [index] * 10, 90) for index in range(5)]
        engine.add(*requests)
        engine.step()
        assert [len(request.block_table) for request in requests] == [7, 7, 0, 0, 0]
        engine.drain()


class FixedAndPatient(SchedulerChecks):
    component = Static
    provides = DRAFTS
    settings = {"batch_size": 3, "max_wait_s": 0.025}

    def make_scheduler(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        scheduler: Scheduler = self.make(
            context,
            max_num_scheduled_tokens=limits.max_num_scheduled_tokens,
            max_num_running_reqs=limits.max_num_running_reqs,
            batch_size=min(3, limits.max_num_running_reqs),
        )
        return scheduler


class TestWaiting(FixedAndPatient):
    def test_a_batch_starts_when_it_is_full(self) -> None:
        engine = self.make_engine()
        requests = [make_request(f"r{i}", [i] * 5, 5) for i in range(3)]
        for request in requests:
            assert not engine.step().scheduled
            engine.add(request)
        assert len(engine.step().scheduled) == 3
        engine.drain()
        self.assert_complete(engine, requests)

    def test_a_batch_that_does_not_fill_starts_all_the_same(self) -> None:
        """Once its first request has waited for 0.025 s; a step takes 0.01 s."""
        engine = self.make_engine()
        engine.add(make_request("a", [1] * 5, 5))
        assert not engine.step().scheduled
        engine.add(make_request("b", [2] * 5, 5))
        assert [len(engine.step().scheduled) for _ in range(3)] == [0, 0, 2]
        engine.drain()

    def test_who_is_added_anew_after_a_recovery_has_waited_all_the_same(self) -> None:
        engine = self.make_engine()
        engine.add(make_request("a", [1] * 5, 5, arrival_time=engine.clock() - 0.03))
        assert len(engine.step().scheduled) == 1
        engine.drain()

    def test_an_abort_does_not_hold_up_the_rest(self) -> None:
        engine = self.make_engine()
        engine.add(*[make_request(f"r{i}", [i] * 5, 50) for i in range(5)])
        engine.step()
        engine.abort("r0", "r1", "r2")
        assert [len(engine.step().scheduled) for _ in range(4)][-1] == 2
        engine.drain()

    @pytest.mark.parametrize(
        ("values", "word"),
        [
            ({"batch_size": 0}, "batch_size"),
            ({"max_wait_s": 5}, "max_wait_s"),
            ({"max_wait_s": float("nan")}, "max_wait_s"),
            ({"batch_size": 9, "max_num_running_reqs": 8}, "max_num_running_reqs"),
        ],
    )
    def test_settings_are_refused_with_the_field_named(self, values: dict[str, object], word: str) -> None:
        with pytest.raises(ValidationError, match=word):
            Static.Settings.model_validate(values)


class StaticMachine(SchedulerMachine):
    checks = TestStatic

    def after_step(self, output: SchedulerOutput) -> None:
        assert not output.preempted
        policy = self.engine.scheduler._policy  # type: ignore[attr-defined]
        assert policy._since.keys() == self.engine.requests.keys() >= policy._batch.keys()
        running = {name for name, request in self.engine.requests.items() if request.block_table}
        assert running <= policy._batch.keys()


class FixedMachine(StaticMachine):
    """A step without work is a wait for more requests, and the first of them has not waited for long."""

    checks = FixedAndPatient

    def before_step(self) -> None:
        self._had_nobody = not self.engine.scheduler._policy._batch  # type: ignore[attr-defined]

    def after_step(self, output: SchedulerOutput) -> None:
        super().after_step(output)
        policy = self.engine.scheduler._policy  # type: ignore[attr-defined]
        if self._had_nobody and not output.scheduled and not output.refused and policy._since and not policy._batch:
            planned_at = self.engine.clock() - self.engine.step_s
            assert planned_at - min(policy._since.values()) < 0.025
            self.engine._num_idle = 0


TestStaticMachine = machine_test(StaticMachine)
TestFixedMachine = machine_test(FixedMachine)
