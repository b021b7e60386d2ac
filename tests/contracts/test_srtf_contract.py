"""`srtf` keeps the scheduler contract and its own promise, whatever the predictor says, under random orders of events."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from core.request import Request
from core.stages.predictor import PredictorContext
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.fakes import Limits
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_checks import SchedulerChecks
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from core.testing.shortest_first import ShortestFirstContract
from core.testing.suites import words_of
from plugins.predictors.learnt import Learnt
from plugins.schedulers.srtf import Srtf


class TestSrtf(SchedulerContract, ShortestFirstContract):
    component = Srtf
    provides = words_of("scheduler", "srtf")

    def test_a_third_is_saved_also_where_lengths_are_learnt(self) -> None:
        self.assert_faster(lambda context: Learnt(Learnt.Settings(), context), 0.33)


class TestSrtfThatDisplacesEasily(SchedulerContract, ShortestFirstContract):
    component = Srtf
    settings = {"margin": 0.0, "prompt_weight": 0.1, "aging": 0.5}
    provides = words_of("scheduler", "srtf")


class Fickle:
    """Says something else each time that a request has got a token, and is nearly always wrong."""

    def remaining(self, request: Request) -> float:
        return random.Random(f"{request.request_id} {request.num_output_tokens}").uniform(0, 100)

    def observe(self, request: Request) -> None:
        """It learns nothing."""


class WithFickle(SchedulerChecks):
    component = Srtf
    settings = {"margin": 0.0, "aging": 50.0, "prompt_weight": 0.0}
    provides = words_of("scheduler", "srtf")

    def make_scheduler(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        return super().make_scheduler(replace(context, predictor=Fickle()), limits)


class TestSrtfWithAFicklePredictor(WithFickle, SchedulerContract):
    pass


class WithLearnt(SchedulerChecks):
    component = Srtf
    settings = {"margin": 2.0}
    provides = words_of("scheduler", "srtf")

    def make_scheduler(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        learnt: Any = Learnt(Learnt.Settings(prior=8.0), PredictorContext(limits.max_model_len))
        return super().make_scheduler(replace(context, predictor=learnt), limits)


class SrtfMachine(SchedulerMachine):
    checks = TestSrtfThatDisplacesEasily


class FickleMachine(SchedulerMachine):
    checks = WithFickle


class LearntMachine(SchedulerMachine):
    checks = WithLearnt


TestSrtfMachine = machine_test(SrtfMachine)
TestFickleMachine = machine_test(FickleMachine)
TestLearntMachine = machine_test(LearntMachine)
