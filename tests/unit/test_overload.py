"""R7 on the simulator's clock: real scheduler, block pool, admission and load meter; steps cost what a formula says.

Open arrivals at a share of what the machine can do. Goodput counts requests whose first token came in time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from core.errors import OverloadedError
from core.request import EngineRequest, SamplingParams
from core.session import open_session
from core.simulation.build import build_simulation
from core.simulation.cost import CostModel, Seconds
from core.simulation.loop import simulate
from core.simulation.records import Arrival, Finish, Outcomes
from core.stages.admission import Admission
from core.stages.frontend import GenerateRequest, Load
from core.stages.load_aware import LoadAware
from core.testing.harness.traffic import Listed

MAX_MODEL_LEN = 8192
MACHINE = CostModel(seconds=Seconds(step=0.012, prefill_token=6e-5, decode=4e-4), max_model_len=MAX_MODEL_LEN)
WORDS = (
    "scheduler=fcfs",
    "scheduler.max_num_scheduled_tokens=1024",
    "scheduler.max_num_running_reqs=32",
    "cache.num_blocks=8000",
    "admission=load_aware",
)
SECONDS = 90.0
QUEUE_S = LoadAware.Settings().max_queue_time or math.inf
IN_TIME_S = QUEUE_S + 1.0  # of a first token: what it may wait, and its own prompt
UNBOUNDED: dict[str, Any] = {"max_in_flight": 10**6, "max_queue_time": None, "queue_timeout": None}
MAX_TOKENS = 2048  # that clients ask for, whatever they then get


@dataclass(frozen=True, slots=True)
class Checked:
    """Whoever is refused is told to come back at a time that makes sense."""

    inner: Admission

    def check_room(self, num_choices: int, load: Load) -> None:
        with checked():
            self.inner.check_room(num_choices, load)

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        with checked():
            return self.inner.admit(request, prompt_token_ids, params, load)


@contextmanager
def checked() -> Iterator[None]:
    try:
        yield
    except OverloadedError as error:
        assert 1.0 <= error.retry_after <= 60.0
        raise


def served(arrivals: Sequence[Arrival], settings: dict[str, Any]) -> Outcomes:
    words = [f"admission.{key}={'null' if value is None else value}" for key, value in settings.items()]
    made = build_simulation(open_session([*WORDS, *words]).description, MACHINE, 1, False)
    return simulate(replace(made, admission=Checked(made.admission)), Listed(arrivals)).outcomes


def lengths(rng: random.Random) -> tuple[int, int]:
    """As conversations are: p50 1020 and 129 tokens, with long tails."""
    return min(int(rng.lognormvariate(6.93, 0.6)) + 1, 5000), min(int(rng.lognormvariate(4.86, 0.8)) + 1, 2000)


def run(rate: float, settings: dict[str, Any], seed: int = 1) -> Outcomes:
    """Arrivals for `SECONDS` at `rate` per second, and all of them to their ends."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) <= SECONDS:
        arrivals.append(Arrival(now, *lengths(rng), MAX_TOKENS))
    return served(arrivals, settings)


def goodput(outcomes: Outcomes) -> float:
    return float((outcomes.served & (outcomes.ttft_s <= IN_TIME_S)).sum()) / SECONDS


@cache
def capacity() -> float:
    """Requests per second, of a machine that never runs out of them: from the last arrival back to the first end."""
    outcomes = run(20.0, UNBOUNDED)
    ends = sorted(outcomes.end_s[outcomes.served].tolist())
    quarter = len(ends) // 4
    return (len(ends) - 2 * quarter) / (ends[-quarter - 1] - ends[quarter])


def share(outcomes: Outcomes, finish: Finish) -> float:
    return float((outcomes.finish == finish).mean())


@pytest.mark.parametrize("seed", [1, 2])
def test_half_as_much_again_costs_no_goodput(seed: int) -> None:
    whole, over = run(capacity(), {}, seed), run(1.5 * capacity(), {}, seed)
    assert goodput(over) >= 0.9 * goodput(whole) > 0.6 * capacity()
    accepted = sorted(over.ttft_s[over.served].tolist())
    assert accepted[int(0.99 * len(accepted))] <= 1.25 * QUEUE_S, (
        "the queue's limit bounds the TTFT of what is accepted"
    )
    assert not share(over, Finish.EXPIRED), "what will not be served in time is not let in"
    assert 0.1 < share(over, Finish.REFUSED) < 0.5


def test_without_the_bound_it_collapses() -> None:
    """So the test above says something."""
    assert goodput(run(1.5 * capacity(), UNBOUNDED)) < 0.75 * goodput(run(capacity(), {}))


def test_little_load_is_refused_nothing() -> None:
    assert run(0.7 * capacity(), {}).served.all()


def test_a_burst_into_an_idle_server_is_taken_as_far_as_the_queue_goes() -> None:
    rng = random.Random(3)
    burst = [Arrival(0.0, *lengths(rng), MAX_TOKENS) for _ in range(1000)]
    outcomes = served(burst, {"max_waiting": 128, "max_in_flight": 4096, "queue_timeout": None})
    assert outcomes.served.sum() == 128
    assert share(outcomes, Finish.REFUSED) == (1000 - 128) / 1000
