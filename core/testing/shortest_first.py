"""The promise of shortest remaining first, as tests::

    class TestMine(SchedulerContract, ShortestFirstContract):
        component = Mine

For schedulers that go by `SchedulerContext.predictor` and have the settings `prompt_weight`, `aging` and `margin`: a request
stands at `work + aging * arrival_time`, its work being what the predictor expects and `prompt_weight` for each token to compute.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any

import pytest

from core.request import Request, SamplingParams
from core.simulation.intervals import t_interval
from core.stages.predictor import Predictor, PredictorContext
from core.testing.fake_loop import queue_scheduler
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks
from core.testing.timed_loop import TimedLoop

ONE = Limits(max_num_running_reqs=1)
TIMED = Limits(2048, 16, 8192)
KINDS = ((400, 4, 0.3), (300, 130, 0.9), (1400, 55, 1.1), (2000, 250, 0.4))
"""Median tokens of prompt and output, and how far outputs spread: classify, chat, complete code, summarize."""
NUM_REQUESTS, RATE = 300, 3.0  # of a run, and per second: a little more than the loop can serve
NUM_RUNS = 5


class Known:
    """A predictor that knows what the loop knows."""

    def __init__(self, context: PredictorContext):
        self._length = context.output_len

    def remaining(self, request: Request) -> float:
        return float(max((self._length(request.request_id) or 0) - request.num_output_tokens, 1))

    def observe(self, request: Request) -> None:
        """It has nothing to learn."""


def traffic(seed: int) -> tuple[list[Request], dict[str, int]]:
    """Arrivals of a Poisson process, of four kinds that show in their first tokens alone; and how long each output is to be."""
    rng, now, requests, lengths = random.Random(seed), 0.0, [], {}
    for index in range(NUM_REQUESTS):
        now += rng.expovariate(RATE)
        kind = rng.randrange(len(KINDS))
        prompt, output, spread = KINDS[kind]
        num_random = min(max(round(prompt * math.exp(rng.gauss(0, 0.5))), 20), 3500) - 16
        ids = [1000 * kind + place for place in range(16)] + [rng.randrange(50_000) for _ in range(num_random)]
        lengths[f"r{index}"] = min(max(round(output * math.exp(rng.gauss(0, spread))), 1), 2000)
        params = SamplingParams(max_tokens=2048)
        requests.append(make_request(f"r{index}", ids, params=params, arrival_time=now))
    return requests, lengths


@cache
def first_come_latency(seed: int) -> float:
    """Mean, in seconds."""
    requests, lengths = traffic(seed)
    return mean(one.latency for one in TimedLoop(lengths, queue_scheduler, limits=TIMED).run(requests).values())


class ShortestFirstContract(SchedulerChecks):
    def values(self) -> Any:
        return self.component.Settings.model_validate(dict(self.settings))

    def work(self, request: Request) -> float:
        """By the bound of max_tokens, before anything is computed."""
        return request.params.max_tokens + float(self.values().prompt_weight) * (request.num_prompt_tokens - 1)

    def at_once(self, engine: FakeEngine) -> FakeEngine:
        """Steps that take no time: all requests are of one age."""
        engine.step_s = 0.0
        return engine

    @OVERLAP
    def test_the_shortest_of_those_that_wait_starts_first(self, num_in_flight: int) -> None:
        engine, rng = self.at_once(self.make_engine(200, ONE, num_in_flight=num_in_flight)), random.Random(1)
        requests = [make_request(f"r{index}", [index] * rng.randint(1, 60), rng.randint(1, 60)) for index in range(20)]
        engine.add(*requests)
        engine.drain()
        assert engine.first_scheduled == [request.request_id for request in sorted(requests, key=self.work)]
        self.assert_complete(engine, requests)

    def test_nobody_is_overtaken_by_those_that_come_too_late(self) -> None:
        """Not before the start, among short ones that come and come: nobody waits for ever."""
        engine, aging = self.make_engine(200, ONE), self.values().aging
        long, engine.step_s = make_request("long", [1] * 20, 40), 1.0 / max(aging, 0.1)
        engine.add(make_request("first", [1], 2), long)
        index = 0
        while long.first_scheduled_time is None:
            engine.add(make_request(f"short{index}", [2], 1))
            engine.step()
            index += 1
            assert index < 500, "a long request waits for ever"
        assert aging
        late = [r for r in engine.ended.values() if r.arrival_time > long.arrival_time + self.work(long) / aging]
        assert not late, f"{late[0].request_id} came later than its aging allows, and was first"
        engine.drain()

    @pytest.mark.parametrize(("less", "gives_way"), [(1, True), (-1, False)])
    def test_a_running_request_gives_way_only_where_that_gains(self, less: int, gives_way: bool) -> None:
        engine, values = self.at_once(self.make_engine(200, ONE)), self.values()
        long = make_request("long", [1] * 11, 400)
        engine.add(long)
        for _ in range(30):
            engine.step()
        left = long.params.max_tokens - long.num_output_tokens
        gain = left - values.margin - values.prompt_weight * long.num_computed_tokens  # one waits for what is lost
        engine.add(make_request("short", [2], math.floor(gain) - less if gives_way else math.ceil(gain) - less))
        engine.step()
        assert engine.preempted == ["long"] * gives_way
        engine.drain()
        assert list(engine.ended) == (["short", "long"] if gives_way else ["long", "short"])
        self.assert_complete(engine, list(engine.ended.values()))

    @OVERLAP
    def test_the_longest_gives_way_when_blocks_lack(self, num_in_flight: int) -> None:
        engine = self.at_once(self.make_engine(8, num_in_flight=num_in_flight, prefix_caching=False))
        requests = [make_request("long", [1] * 60, 60), make_request("short", [2] * 30, 50)]
        engine.add(*requests)
        engine.drain()
        assert set(engine.preempted) == {"long"}
        assert list(engine.ended) == ["short", "long"]
        self.assert_complete(engine, requests)

    def test_mean_latency_is_below_that_of_first_come_first_served(self) -> None:
        """By a 95 % interval over runs that excludes 0, where output lengths are known."""
        self.assert_faster(Known)

    def assert_faster(self, predictor: Callable[[PredictorContext], Predictor], least: float = 0.0) -> None:
        """`least`: the share of the mean latency of first come, first served that must be saved at least."""
        saved = [self._saved(seed, predictor) for seed in range(NUM_RUNS)]
        found = t_interval(saved)
        assert found.low > least, f"{found} of the mean latency is saved"

    def _saved(self, seed: int, predictor: Callable[[PredictorContext], Predictor]) -> float:
        """Share of the mean latency of first come, first served."""
        requests, lengths = traffic(seed)
        ours = TimedLoop(lengths, self.make_scheduler, predictor, TIMED).run(requests)
        return 1 - mean(one.latency for one in ours.values()) / first_come_latency(seed)
