"""Schedulers under events in any order, as a state machine of hypothesis::

    class LotteryMachine(SchedulerMachine):
        checks = TestLottery  # a SchedulerChecks: its component and settings

    TestLotteryMachine = machine_test(LotteryMachine)

`FakeEngine` checks budgets, blocks, token counts, progress and single endings after each step; at the end nobody is lost and
every output is that of a solo run. A policy adds its own promise in `after_step` and `after_all`. Needs hypothesis.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core.batch import SchedulerOutput
from core.request import FinishReason, Request
from core.testing.fakes import FakeClock, FakeDrafts, FakeEngine, Limits, assert_right_output, make_request
from core.testing.scheduler_checks import SchedulerChecks, SeenStep, seen_step

REASONS = frozenset({FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR, FinishReason.EXPIRED})
TENANTS = ("", "a", "b", "c")
ONE_LONG: Mapping[str, Any] = {"long_chunk_size": 20, "long_prompt": 40, "max_long_prefills": 1}
PACED: Mapping[str, Any] = {
    "target_tpot": 0.012,
    "min_chunk": 4,
}  # ten tokens of prompts in a step, as `FakeEngine` tells it
PREFILLS: Sequence[Mapping[str, Any]] = (
    {"whole": True, "chunked": {}},
    *({"whole": False, "chunked": chunked} for chunked in ({}, ONE_LONG, PACED, {**ONE_LONG, **PACED})),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, pauses, aborts, failed requests and failed schedulers; tiny pools and budgets, overlap, drafts; prompts
    whole and in chunks, of fixed size or by what steps take, of which long ones may have to wait for each other."""

    checks: ClassVar[type[SchedulerChecks]]
    deadlines: ClassVar[bool] = True  # some requests must be scheduled by a time, or expire

    def before_step(self) -> None:
        """What the policy's promise must know of `self.engine` before each step."""

    def after_step(self, output: SchedulerOutput) -> None:
        """What the policy promises of each step. `self.seen` says more, and `self.engine` is as the step has left it.

        `self.seen.passed` are those who waited for room, or for their turn: not for stage 5 (`held_back`).
        """

    def after_all(self) -> None:
        """What the policy promises of the whole; every request has ended, and `self.added` has them in order of `add`."""

    def held_back(self, request: Request) -> bool:
        """Whether stage 5 may be why a request waits while others that came later start."""
        chunked = self.options["chunked"]
        is_long = "max_long_prefills" in chunked and request.num_known_tokens >= chunked["long_prompt"]
        return is_long or "target_tpot" in chunked

    def after_recovery(self) -> None:
        """The scheduler is a new one, and so are the records of the requests."""

    @initialize(
        num_blocks=st.integers(4, 24),
        budget=st.integers(6, 48),
        max_running=st.integers(1, 6),
        num_in_flight=st.integers(0, 2),
        options=st.fixed_dictionaries(
            {"prefix_caching": st.booleans(), "num_swap_blocks": st.sampled_from([0, 0, 5, 40])}
        ),
        prefill=st.sampled_from(PREFILLS),
        drafts=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        max_running: int,
        num_in_flight: int,
        options: dict[str, Any],
        prefill: Mapping[str, Any],
        drafts: bool,
    ) -> None:
        self.added: list[str] = []
        self.options = {
            "num_blocks": num_blocks,
            "limits": Limits(budget, max_running, max_model_len=200),
            "num_in_flight": num_in_flight,
            "decode": FakeDrafts(2, 1) if drafts and "drafts" in self.checks.provides else None,
            "chunk_size": 13,
            "clock": FakeClock(),
            **options,
            **prefill,
        }
        self.engine: FakeEngine = self._make_engine()

    @rule(
        length=st.integers(1, 90),
        head=st.sampled_from([0, 16, 32]),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 3),
        tenant=st.sampled_from(TENANTS),
        deadline_s=st.none() | st.sampled_from([0.0, 0.03, 0.3]),
    )
    def arrive(
        self,
        length: int,
        head: int,
        max_tokens: int,
        seed: int,
        priority: int,
        tenant: str,
        deadline_s: float | None,
    ) -> None:
        name = f"r{len(self.added)}"
        prompt = [1] * head + [(seed + index) % 50 for index in range(length)]
        deadline = None if deadline_s is None or not self.deadlines else self.engine.clock() + deadline_s
        self.engine.add(
            make_request(name, prompt, max_tokens, seed=seed, priority=priority, tenant=tenant, deadline=deadline)
        )
        self.added.append(name)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(seconds=st.sampled_from([0.001, 0.1, 2.0]))
    def pause(self, seconds: float) -> None:
        """The next step takes longer."""
        self.engine.clock.advance(seconds)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(self._one(data))

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The next result of one request is an error."""
        self.engine.failing.add(self._one(data))

    @precondition(lambda self: self.engine.requests)
    @rule()
    def recover(self) -> None:
        """The scheduler is lost, with all that was in flight: a new one, over a new cache, gets the requests again."""
        before, self.engine = self.engine, self._make_engine()
        self.engine.ended, self.engine.first_scheduled = before.ended, before.first_scheduled
        self.engine.preempted, self.engine.failing = before.preempted, before.failing
        self.engine.add(*[_again(request) for request in before.requests.values()])
        self.after_recovery()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.requests:
            self._step()
        self.engine.drain()
        assert self.engine.ended.keys() == set(self.added)
        for request in self.engine.ended.values():
            assert_right_output(request)
        assert {request.finish_reason for request in self.engine.ended.values()} <= REASONS
        self.after_all()

    def _make_engine(self) -> FakeEngine:
        return self.checks().make_engine(**self.options)

    def _step(self) -> None:
        self.before_step()
        seen = seen_step(self.engine)
        self.seen: SeenStep = replace(seen, passed=tuple(r for r in seen.passed if not self.held_back(r)))
        self.after_step(self.seen.output)

    def _one(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.engine.requests)))


def _again(request: Request) -> Request:
    """As `core.isolation.scheduler.Live.again` makes it: preempted, its output kept."""
    again = request.afresh(request.output_token_ids)
    if request.first_scheduled_time is not None:
        again.first_scheduled_time = request.first_scheduled_time
        again.num_preemptions = request.num_preemptions + 1
    return again


def machine_test(machine: type[SchedulerMachine], max_examples: int = 60) -> type[unittest.TestCase]:
    """The machine as a test class, for a module's namespace."""
    case: Any = machine.TestCase
    case.settings = settings(
        max_examples=max_examples, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    found: type[unittest.TestCase] = case
    return found
