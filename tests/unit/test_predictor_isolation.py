"""A predictor that goes wrong is reported and hurts nobody: its bound is what counts then."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from core.isolation.faults import Faults
from core.isolation.predictor import GuardedPredictor
from core.request import Request, RequestStatus, SamplingParams
from core.stages.predictor import MaxTokens, PredictorContext
from core.testing.engines import MAX_MODEL_LEN
from core.testing.fakes import make_request
from core.testing.harness.engine_isolation import (
    NAMES,
    VICTIM,
    Answers,
    Chaos,
    assert_solo,
    assert_whole,
    engine_of,
    requests,
    run,
)
from plugins.schedulers.fcfs import Fcfs
from plugins.schedulers.srtf import Srtf

WHO = "predictor=chaos (plugin chaos, acme-chaos 1.0)"


class Says:
    def __init__(self, answer: Any):
        self.answer, self.seen = answer, []

    def remaining(self, request: Request) -> Any:
        return self.answer(request) if callable(self.answer) else self.answer

    def observe(self, request: Request) -> None:
        self.seen.append(request.request_id)
        self.remaining(request)


def raises(request: Request) -> Any:
    raise SystemExit(3)


def marks(request: Request) -> float:
    request.status = RequestStatus.FINISHED_ABORTED
    return 5.0


def a_request() -> Request:
    return make_request("a", [1] * 10, params=SamplingParams(max_tokens=100), output_token_ids=[2] * 40)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (math.nan, "remaining returned nan; it must be finite, and 0 or more"),
        (math.inf, "remaining returned inf; it must be finite"),
        (-1, "remaining returned -1; it must be finite, and 0 or more"),
        ("many", "remaining returned 'many', which is no float"),
        (None, "remaining returned None, which is no float"),
        (True, "remaining returned True, which is no float"),
        (np.float64(3), "which is no float"),
        (raises, "SystemExit"),
        (marks, "it changed a request, which is not its to change"),
    ],
)
def test_what_cannot_be_is_the_bound_and_is_noted(answer, reason):
    faults, request = Faults(NAMES), a_request()
    assert GuardedPredictor(Says(answer), faults, MAX_MODEL_LEN).remaining(request) == 60.0
    (incident,) = faults.take_incidents()
    assert reason in incident.reason and incident.group == "predictor" and not incident.quarantined
    assert not faults.requests and request.status is RequestStatus.WAITING


@pytest.mark.parametrize(
    ("answer", "found"), [(0, 0.0), (7, 7.0), (7.5, 7.5), (60.0, 60.0), (1e300, 60.0), (10**400, 60.0)]
)
def test_what_can_be_is_taken_and_never_more_than_the_bound(answer, found):
    faults = Faults(NAMES)
    got = GuardedPredictor(Says(answer), faults, MAX_MODEL_LEN).remaining(a_request())
    assert got == found and type(got) is float and not faults.take_incidents()


@pytest.mark.parametrize("answer", [raises, marks])
def test_what_it_does_wrong_when_it_is_told_of_an_end_is_noted(answer):
    faults, request = Faults(NAMES), a_request()
    GuardedPredictor(Says(answer), faults, MAX_MODEL_LEN).observe(request)
    assert [incident.group for incident in faults.take_incidents()] == ["predictor"]
    assert request.status is RequestStatus.WAITING and not faults.requests


class OurSrtf(Srtf):
    """With the limits of the harness."""

    def __init__(self, settings: Any, context: Any):
        super().__init__(Srtf.Settings(**settings.model_dump()), context)


class ChaosPredictor(MaxTokens):
    """Wrong about one request, whether it is asked or told."""

    def __init__(self, chaos: Chaos):
        super().__init__(MaxTokens.Settings(), PredictorContext(MAX_MODEL_LEN))
        self.chaos = chaos

    def remaining(self, request: Request) -> Any:
        left = super().remaining(request)
        if request.request_id != VICTIM:
            return left
        self.chaos.strike(lambda: setattr(request, "status", RequestStatus.FINISHED_STOPPED))
        return self.chaos.value(left, [left])

    def observe(self, request: Request) -> None:
        self.remaining(request)


def ran(chaos: Chaos) -> Answers:
    faults = Faults(NAMES, block_timeout=2.0, clock=chaos.clock)
    engine = engine_of(OurSrtf, predictor=ChaosPredictor(chaos), faults=faults)
    sent = requests()
    answers = run(engine, sent)
    assert chaos.fired
    assert_solo(answers, sent)  # all of them
    assert_whole(engine)
    return answers


@pytest.mark.parametrize("kind", ["raise", "exit", "wrong shape", "NaN", "mutate"])
def test_nobody_fails_and_who_it_was_is_told(kind):
    answers = ran(Chaos(kind))
    assert {(i.group, i.name, i.plugin) for i in answers.incidents} == {("predictor", "chaos", "chaos, acme-chaos 1.0")}


def test_a_call_that_blocks_is_reported():
    incidents = ran(Chaos("block")).incidents
    assert {(i.group, i.reason) for i in incidents} == {
        ("predictor", "blocked 5.0 s in one call (plugins.block_timeout=2)")
    }


class FailsOnce(OurSrtf):
    """Its books are lost in the middle."""

    num_plans = 0

    def schedule(self) -> Any:
        FailsOnce.num_plans += 1
        if FailsOnce.num_plans == 12:
            raise RuntimeError("lost")
        return super().schedule()


def test_what_was_learnt_outlives_the_books_and_trials_teach_nothing():
    FailsOnce.num_plans = 0
    predictor = Says(lambda request: 5.0)
    engine, sent = engine_of(FailsOnce, predictor=predictor), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert [incident.group for incident in answers.incidents] == ["scheduler"]
    assert sorted(predictor.seen) == sorted(request.request_id for request in sent)  # each once


def test_a_scheduler_that_asks_nobody_goes_without():
    predictor = Says(raises)
    engine, sent = engine_of(Fcfs, predictor=predictor), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert not answers.incidents and not predictor.seen
