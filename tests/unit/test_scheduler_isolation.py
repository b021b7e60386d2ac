"""A scheduler whose books cannot be trusted costs the request that they are wrong on, and the engine makes new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from core.batch import SchedulerOutput
from core.isolation.faults import Faults
from core.request import FinishReason, Request, RequestStatus
from core.stages.prefill import Chunked, PrefillContext
from core.testing.engines import engine_request, make_engine
from core.testing.harness.engine_isolation import (
    NAMES,
    NUM_BLOCKS,
    NUM_REQUESTS,
    SETTINGS,
    VICTIM,
    assert_solo,
    assert_whole,
    due,
    engine_of,
    requests,
    run,
)
from core.testing.harness.fake_executors import FakeExecutor
from plugins.schedulers.fcfs import Fcfs


@dataclass
class Spoils:
    """Changes a plan, once."""

    change: Any
    done: bool = False

    def __call__(self, plan: SchedulerOutput) -> SchedulerOutput:
        hit = next((part for part in plan.scheduled if due(part.request)), None)
        if hit is None or self.done:
            return plan
        self.done = True
        changed = self.change(hit)
        parts = [changed if part is hit else part for part in plan.scheduled]
        return replace(plan, scheduled=tuple(part for part in parts if part is not None))


def stranger(request: Request) -> Request:
    return Request("nobody", [1, 2, 3], request.params, status=RequestStatus.RUNNING)


FLAWS = {
    "a later start": lambda part: structs.replace(part, start=part.start + 1),
    "an earlier start, in a shared block": lambda part: structs.replace(part, start=0),
    "more tokens than known": lambda part: structs.replace(part, num_tokens=2),
    "drafts that nobody made": lambda part: structs.replace(part, num_drafts=1),
    "samples nothing": lambda part: structs.replace(part, samples=False),
    "true for one": lambda part: structs.replace(part, num_tokens=True),
    "another block table": lambda part: setattr(part.request, "block_table", list(part.request.block_table)) or part,
    "a status of its own": lambda part: setattr(part.request, "status", "running") or part,
    "no output any more": lambda part: setattr(part.request, "output_token_ids", None) or part,
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_plan_that_cannot_be_costs_the_request_that_it_names(flaw: str) -> None:
    spoils = Spoils(FLAWS[flaw])

    class Spoilt(Fcfs):
        def schedule(self) -> SchedulerOutput:
            return spoils(super().schedule())

    engine = make_engine(Spoilt, SETTINGS, FakeExecutor(), num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    assert answers.error(VICTIM).startswith("scheduler=chaos")
    assert [incident.group for incident in answers.incidents] == ["scheduler"]
    assert_whole(engine)


@pytest.mark.parametrize(
    "plan",
    [
        None,
        7,
        SchedulerOutput(step=1.5),  # type: ignore[arg-type]
        SchedulerOutput(step=1, scheduled=("r1",)),  # type: ignore[arg-type]
        SchedulerOutput(step=1, refused=("r1",)),  # type: ignore[arg-type]
        SchedulerOutput(step=1, preempted=(stranger(Request("r", [1], engine_request("r", [1]).params)),)),
    ],
)
def test_a_plan_that_is_none_fails_nobody_when_it_does_not_come_again(plan: Any) -> None:
    plans = {4: plan}

    class Odd(Fcfs):
        num_plans = 0

        def schedule(self) -> Any:
            Odd.num_plans += 1
            return plans.pop(4) if Odd.num_plans == 4 else super().schedule()

    engine = make_engine(Odd, SETTINGS, FakeExecutor(), num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()
    answers = run(engine, sent)
    assert not plans
    assert_solo(answers, sent)
    assert [(i.group, i.failures) for i in answers.incidents] == [("scheduler", 1)]
    assert_whole(engine)


class Counting(Fcfs):
    """Calls of all its instances; `fault` may raise."""

    num_calls: dict[str, int]
    fault: Any

    def _call(self, name: str) -> None:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        type(self).fault(name, self.num_calls[name], self)

    def schedule(self) -> Any:
        self._call("schedule")
        return super().schedule()

    def update(self, output: SchedulerOutput, verdicts: Any) -> Any:
        self._call("update")
        return super().update(output, verdicts)

    def finish(self, request_ids: Any, reason: FinishReason) -> Any:
        self._call("finish")
        return super().finish(request_ids, reason)

    def counts(self) -> Any:
        self._call("counts")
        return super().counts()


def counting(fault: Any) -> Any:
    return type("Counted", (Counting,), {"num_calls": {}, "fault": staticmethod(fault)})


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_failures_that_come_and_go_cost_nobody(where: str) -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == where and count % 70 == 5:
            raise OSError("now and then")

    scheduler = counting(fault)
    engine, sent = engine_of(scheduler), requests()
    assert_solo(run(engine, sent), sent)
    assert scheduler.num_calls[where] > 5
    assert_whole(engine)


def test_counts_that_fail_are_the_engines_own() -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == "counts":
            raise OSError("no idea")

    engine, sent = engine_of(counting(fault)), requests()
    engine.add(sent)
    stats = engine.step().stats
    assert (stats.running + stats.waiting) == NUM_REQUESTS
    assert stats.running > 0
    assert_solo(run(engine, []), [])


def test_a_scheduler_that_always_fails_fails_all_and_then_the_engine_ends() -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == "schedule":
            raise OSError("for good")

    engine = engine_of(counting(fault))
    for _ in range(2):
        answers = run(engine, requests())
        assert all("OSError: for good" in answers.error(f"r{i}") for i in range(NUM_REQUESTS))
    with pytest.raises(RuntimeError, match="every request failed: scheduler: OSError: for good"):
        run(engine, requests())


def test_requests_that_fail_only_together_are_given_up_newest_first() -> None:
    """Nobody fails alone: r3 and r20 may not be in flight at the same time."""

    def fault(name: str, count: int, scheduler: Any) -> None:
        live = {request.request_id for request in scheduler._queues.running + scheduler._queues.waiting}
        if name == "schedule" and {"r3", "r20"} <= live:
            raise OSError("a clash")

    engine, sent = engine_of(counting(fault)), requests()
    answers = run(engine, sent)
    lost = [request.request_id for request in sent if answers.ends(request.request_id) == [FinishReason.ERROR]]
    assert lost == [f"r{i}" for i in range(16, 32)]
    assert "a clash (4 times in a row)" in answers.error("r20")
    assert_solo(answers, sent[:16])
    assert_whole(engine)


def test_a_request_that_a_scheduler_loses_is_at_fault_and_the_others_go_on() -> None:
    class Loses(Fcfs):
        def add(self, request: Request) -> None:
            if request.request_id != VICTIM:
                super().add(request)

    engine, sent = engine_of(Loses), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    assert answers.error(VICTIM).startswith("scheduler=chaos")
    assert_whole(engine)


def test_a_prefill_that_starves_a_request_is_named_when_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.MAX_STALLED_STEPS", 3)

    class Starves(Chunked):
        def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
            return 0 if request.request_id == VICTIM else super().num_tokens(request, remaining, token_budget)

    settings, context = Chunked.Settings(), PrefillContext(256)
    engine, sent = engine_of(Fcfs, prefill=lambda: Starves(settings, context)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith(
        "prefill=chaos (plugin chaos, acme-chaos 1.0): it leaves the request waiting"
    )
    assert_whole(engine)
