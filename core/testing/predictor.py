"""What every predictor must do, as tests::

    class TestMine(PredictorContract):
        component = Mine

Whether predictions are good is not asked: wrong ones cost time and change no output.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from dataclasses import replace

import pytest

from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus, SamplingParams
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.predictor import Predictor, PredictorContext, num_tokens_left
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.clocks import trap_clocks
from core.testing.contract import Contract
from core.testing.fake_loop import assert_complete, fake_engine, random_requests
from core.testing.fakes import Limits, make_request, snapshot

MAX_MODEL_LEN = 4096
ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
WARM, MORE = 400, 4000  # requests that have ended, before memory is measured and while it is
MAX_GROWTH = 256 * 1024  # bytes that `MORE` of them may take: 64 for each


def a_request(rng: random.Random, name: str, num_output: int | None = None) -> Request:
    """Running, with some output, of one of many tenants and applications."""
    max_tokens = rng.choice([1, 2, 16, 100, 512, MAX_MODEL_LEN])
    num_prompt = rng.choice([1, 2, 30, 700, MAX_MODEL_LEN - 1])
    most = min(max_tokens, MAX_MODEL_LEN - num_prompt)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.2,
        stop=rng.choice([(), ("\n",)]),
    )
    return make_request(
        name,
        [rng.randrange(50_000) for _ in range(num_prompt)],
        params=params,
        tenant=rng.choice(["", "one", f"tenant {rng.random()}", "\udc80"]),
        output_token_ids=[3] * (rng.randint(0, most) if num_output is None else min(num_output, most)),
        status=RequestStatus.RUNNING,
    )


def end(request: Request, rng: random.Random) -> Request:
    request.finish_reason = rng.choice(ENDS)
    request.status = STATUS_OF_REASON[request.finish_reason]
    return request


def teach(predictor: Predictor, rng: random.Random, count: int) -> None:
    for index in range(count):
        predictor.observe(end(a_request(rng, f"past {index}"), rng))


class Shortest(Policy):
    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def rank(self, request: Request) -> float:
        return self._predictor.remaining(request)

    def left(self, request: Request) -> None:
        if request.finish_reason in ENDS:
            self._predictor.observe(request)


class PredictorContract(Contract):
    def make_predictor(self, max_model_len: int = MAX_MODEL_LEN) -> Predictor:
        predictor: Predictor = self.make(PredictorContext(max_model_len))
        return predictor

    @pytest.mark.parametrize("num_past", [0, 1, 300])
    def test_what_is_left_is_a_finite_float_within_the_bounds(self, num_past: int) -> None:
        predictor, rng = self.make_predictor(), random.Random(num_past)
        teach(predictor, rng, num_past)
        for index in range(300):
            request = a_request(rng, f"r{index}")
            left, most = predictor.remaining(request), num_tokens_left(request, MAX_MODEL_LEN)
            assert type(left) is float, f"{left!r} is no float"
            assert math.isfinite(left) and 0 <= left <= most, (
                f"{left} tokens, of {most} that the request may still have"
            )

    def test_also_of_one_that_goes_on_for_ever(self) -> None:
        """Past everything that was seen before, token by token, and from its first to its last."""
        predictor, rng = self.make_predictor(), random.Random(1)
        for index in range(50):
            request = end(a_request(rng, f"past {index}", num_output=3), rng)
            predictor.observe(request)
        request = make_request("long", [1] * 10, params=SamplingParams(max_tokens=MAX_MODEL_LEN))
        for _ in range(MAX_MODEL_LEN - 10):
            left, most = predictor.remaining(request), num_tokens_left(request, MAX_MODEL_LEN)
            assert math.isfinite(left) and 0 <= left <= most, f"{left} tokens after {request.num_output_tokens}"
            request.append_output([5])

    def test_requests_are_left_as_they_are(self) -> None:
        predictor, rng = self.make_predictor(), random.Random(2)
        for index in range(100):
            request = a_request(rng, f"r{index}")
            before = snapshot(request)
            predictor.remaining(request)
            assert snapshot(request) == before, "remaining changed a request"
            before = snapshot(end(request, rng))
            predictor.observe(request)
            assert snapshot(request) == before, "observe changed a request"

    def test_to_ask_changes_no_answer(self) -> None:
        """A scheduler asks of each request as often as it likes, in any order."""
        predictor, rng = self.make_predictor(), random.Random(3)
        teach(predictor, rng, 100)
        requests = [a_request(rng, f"r{index}") for index in range(50)]
        first = [predictor.remaining(request) for request in requests]
        for request in reversed(requests * 3):
            predictor.remaining(request)
        assert [predictor.remaining(request) for request in requests] == first

    def test_the_same_past_gives_the_same_answers(self) -> None:
        answers = []
        for _ in range(2):
            predictor, rng = self.make_predictor(), random.Random(4)
            teach(predictor, rng, 200)
            answers.append([predictor.remaining(a_request(rng, f"r{index}")) for index in range(50)])
        assert answers[0] == answers[1]

    def test_memory_does_not_grow_with_requests(self) -> None:
        """Also not by those that are only asked about: they may be aborted, and nobody says so."""
        predictor, rng = self.make_predictor(), random.Random(5)
        one = a_request(rng, "one", num_output=4)
        self._ask_and_teach(predictor, one, WARM, "warm")
        gc.collect()
        tracemalloc.start()
        try:
            self._ask_and_teach(predictor, one, MORE, "more")
            gc.collect()
            growth, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert growth <= MAX_GROWTH, f"{MORE} requests leave {growth} bytes behind"

    def _ask_and_teach(self, predictor: Predictor, like: Request, count: int, name: str) -> None:
        for index in range(count):
            prompt = [index, index + 1, index + 2, len(name)]
            request = make_request(f"{name} {index}", prompt, params=like.params, tenant=f"{name} {index}")
            predictor.remaining(request)
            if index % 2:
                request.append_output([1] * (index % 50))
                request.finish_reason = FinishReason.STOP
                predictor.observe(request)

    def test_it_has_no_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        predictor, rng = self.make_predictor(), random.Random(6)
        called = trap_clocks(monkeypatch, type(predictor))
        teach(predictor, rng, 20)
        predictor.remaining(a_request(rng, "r"))
        monkeypatch.undo()
        assert not called, f"the predictor reads {called[0]}"

    @pytest.mark.parametrize("num_blocks", [9, 60])
    def test_outputs_are_those_of_a_solo_run(self, num_blocks: int) -> None:
        """Under a scheduler that goes by what it says."""
        requests = random_requests(random.Random(num_blocks), 24)
        engine = fake_engine(num_blocks, scheduler=self._shortest_first)
        for request in requests:
            engine.add(request)
            engine.step()
        engine.drain()
        assert_complete(engine, requests)

    def _shortest_first(self, context: SchedulerContext, limits: Limits) -> Scheduler:
        predictor = self.make_predictor(limits.max_model_len)
        settings = QueueSettings(
            max_num_scheduled_tokens=limits.max_num_scheduled_tokens, max_num_running_reqs=limits.max_num_running_reqs
        )
        return QueueScheduler(settings, replace(context, predictor=predictor), Shortest(predictor))
