"""R7 on a clock that the test turns: real scheduler, block pool, admission and load meter; steps cost what a formula says.

Open arrivals at a share of what the machine can do. Goodput counts requests whose first token came in time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from core.batch import SchedulerOutput, Verdict
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.errors import OverloadedError
from core.front.load import LoadMeter
from core.outputs import StepStats
from core.request import FinishReason, Request, SamplingParams
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.admission import AdmissionContext
from core.stages.decode import DecodeContext, Plain
from core.stages.frontend import GenerateRequest
from core.stages.load_aware import LoadAware
from core.stages.prefill import Chunked, PrefillContext
from core.stages.renderer import TokenPrompt
from core.stages.scheduler import SchedulerContext
from core.testing.engines import fake_spec
from core.testing.fakes import FakeClock

MAX_MODEL_LEN = 8192
FIXED_S, PREFILL_S, DECODE_S = 0.012, 6e-5, 4e-4
SECONDS = 90.0
QUEUE_S = LoadAware.Settings().max_queue_time or math.inf
IN_TIME_S = QUEUE_S + 1.0  # of a first token: what it may wait, and its own prompt
UNBOUNDED: dict[str, Any] = {"max_in_flight": 10**6, "max_queue_time": None, "queue_timeout": None}


@dataclass(slots=True)
class Outcome:
    arrival: float
    tokens: int  # that it will have
    refused: bool = False
    expired: bool = False
    first_token: float = math.inf
    end: float = math.inf

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival


@dataclass(slots=True)
class Machine:
    """One server. `outcomes` by request id."""

    settings: dict[str, Any]
    clock: FakeClock = field(default_factory=FakeClock)
    meter: LoadMeter = field(default_factory=LoadMeter)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    admission: LoadAware = field(init=False)
    scheduler: QueueScheduler = field(init=False)
    lives: int = 0

    def __post_init__(self) -> None:
        limits = QueueSettings(max_num_scheduled_tokens=1024, max_num_running_reqs=32)
        self.admission = LoadAware(
            LoadAware.Settings(**self.settings),
            AdmissionContext(fake_spec(max_model_len=MAX_MODEL_LEN), self.clock, lambda: 0),
        )
        cache = PagedCache(PagedCache.Settings(enable_prefix_caching=False), CacheContext(8000, MAX_MODEL_LEN))
        prefill = Chunked(Chunked.Settings(), PrefillContext(limits.max_num_scheduled_tokens))
        decode = Plain(Plain.Settings(), DecodeContext(MAX_MODEL_LEN))
        context = SchedulerContext(cache, prefill, decode, self.clock, MAX_MODEL_LEN)
        self.scheduler = QueueScheduler(limits, context, Policy())

    def arrive(self, key: str, at: float, num_prompt: int, tokens: int) -> None:
        outcome = self.outcomes[key] = Outcome(at, tokens)
        call, params = GenerateRequest(key, TokenPrompt([1]), SamplingParams(), max_tokens=2048), SamplingParams()
        try:
            self.admission.check_room(1, self.meter.load())
            (sequence,) = self.admission.admit(call, [1] * num_prompt, params, self.meter.load())
        except OverloadedError as error:
            assert 1.0 <= error.retry_after <= 60.0
            outcome.refused = True
            return
        self.meter.add(sequence)
        self.scheduler.add(Request.from_engine_request(sequence))
        self.lives += 1

    def step(self) -> None:
        plan = self.scheduler.schedule()
        num_decodes = sum(part.num_tokens == 1 for part in plan.scheduled)
        num_prefill = plan.num_scheduled_tokens - num_decodes
        seconds = FIXED_S + PREFILL_S * num_prefill + DECODE_S * num_decodes
        self.clock.advance(seconds)
        for request in plan.refused:
            self.outcome(request).expired = True
            self.end(request, None)
        for request in self.scheduler.update(plan, dict(self.verdicts(plan))):
            self.outcome(request).end = self.clock()
            self.end(request, request.num_output_tokens)
        counts = self.scheduler.counts()
        self.meter.step(
            StepStats(
                num_requests=len(plan.scheduled),
                num_scheduled_tokens=plan.num_scheduled_tokens,
                num_prefill_tokens=num_prefill,
                running=counts.running,
                waiting=counts.waiting,
                forward_s=seconds,
            )
        )

    def verdicts(self, plan: SchedulerOutput) -> Iterator[tuple[str, Verdict]]:
        for part in plan.scheduled:
            if part.samples:
                outcome, request = self.outcome(part.request), part.request
                outcome.first_token = min(outcome.first_token, self.clock())
                self.meter.started(request.request_id)
                last = request.num_output_tokens + 1 == outcome.tokens
                yield request.request_id, Verdict((1,), FinishReason.LENGTH if last else None)

    def outcome(self, request: Request) -> Outcome:
        return self.outcomes[request.request_id.partition("#")[0]]

    def end(self, request: Request, num_output: int | None) -> None:
        self.meter.ended(request.request_id, num_output)
        self.lives -= 1


def lengths(rng: random.Random) -> tuple[int, int]:
    """As conversations are: p50 1020 and 129 tokens, with long tails."""
    return min(int(rng.lognormvariate(6.93, 0.6)) + 1, 5000), min(int(rng.lognormvariate(4.86, 0.8)) + 1, 2000)


def run(rate: float, settings: dict[str, Any], seed: int = 1) -> list[Outcome]:
    """Arrivals for `SECONDS` at `rate` per second, and all of them to their ends."""
    rng, machine = random.Random(seed), Machine(settings)
    start = next_at = machine.clock()
    for number in itertools.count():
        next_at += rng.expovariate(rate)
        if next_at > start + SECONDS:
            break
        while machine.lives and machine.clock() < next_at:
            machine.step()
        machine.clock.now = max(machine.clock(), next_at)
        machine.arrive(f"r{number}", next_at, *lengths(rng))
    while machine.lives:
        machine.step()
    assert machine.meter.load().in_flight == 0
    return list(machine.outcomes.values())


def goodput(outcomes: list[Outcome]) -> float:
    return sum(outcome.ttft <= IN_TIME_S and outcome.end < math.inf for outcome in outcomes) / SECONDS


@cache
def capacity() -> float:
    """Requests per second, of a machine that never runs out of them: from the last arrival back to the first end."""
    ends = sorted(outcome.end for outcome in run(20.0, UNBOUNDED) if outcome.end < math.inf)
    quarter = len(ends) // 4
    return (len(ends) - 2 * quarter) / (ends[-quarter - 1] - ends[quarter])


def ttfts(outcomes: list[Outcome]) -> list[float]:
    return sorted(outcome.ttft for outcome in outcomes if outcome.first_token < math.inf)


@pytest.mark.parametrize("seed", [1, 2])
def test_half_as_much_again_costs_no_goodput(seed: int) -> None:
    whole, over = run(capacity(), {}, seed), run(1.5 * capacity(), {}, seed)
    assert goodput(over) >= 0.9 * goodput(whole) > 0.6 * capacity()
    accepted = ttfts(over)
    assert accepted[int(0.99 * len(accepted))] <= 1.25 * QUEUE_S, (
        "the queue's limit bounds the TTFT of what is accepted"
    )
    assert not any(outcome.expired for outcome in over), "what will not be served in time is not let in"
    assert 0.1 < sum(outcome.refused for outcome in over) / len(over) < 0.5


def test_without_the_bound_it_collapses() -> None:
    """So the test above says something."""
    assert goodput(run(1.5 * capacity(), UNBOUNDED)) < 0.75 * goodput(run(capacity(), {}))


def test_little_load_is_refused_nothing() -> None:
    outcomes = run(0.7 * capacity(), {})
    assert not any(outcome.refused or outcome.expired for outcome in outcomes)


def test_a_burst_into_an_idle_server_is_taken_as_far_as_the_queue_goes() -> None:
    machine = Machine({"max_waiting": 128, "max_in_flight": 4096, "queue_timeout": None})
    rng = random.Random(3)
    for number in range(1000):
        machine.arrive(f"r{number}", machine.clock(), *lengths(rng))
    assert machine.lives == 128
    while machine.lives:
        machine.step()
    assert sum(outcome.end < math.inf for outcome in machine.outcomes.values()) == 128
