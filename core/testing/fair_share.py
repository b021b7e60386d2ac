"""The promise of schedulers that share service among tenants, as tests::

    class TestMine(SchedulerContract, FairShareContract):
        component = Mine

Service is what an OSDI'24 paper (Sheng et al.) measures it by: `input_weight` per prompt token that is not found in the
cache, when its request is admitted, and `output_weight` per token of output.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import pytest

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.simulation.metrics import jain
from core.testing.fake_loop import BLOCK_SIZE
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.scheduler_checks import OVERLAP, SchedulerChecks


class Service:
    """What each tenant has had, and how far two of them that wait throughout have drifted apart."""

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0):
        self._weights = input_weight, output_weight
        self._running: dict[str, tuple[Request, int]] = {}  # with the tokens of output that are counted
        self._leads: dict[tuple[str, str], tuple[float, float]] = {}  # least and most, while both wait
        self.of: defaultdict[str, float] = defaultdict(float)
        self.drift = 0.0

    def take(self, engine: FakeEngine, output: SchedulerOutput) -> None:
        for part in output.scheduled:
            request = part.request
            if request.request_id not in self._running:
                num_computed = request.num_prompt_tokens - request.num_cached_tokens
                self.of[request.tenant] += num_computed * self._weights[0]
                self._running[request.request_id] = request, 0
        for request, num_counted in self._running.values():
            self.of[request.tenant] += (request.num_output_tokens - num_counted) * self._weights[1]
            self._running[request.request_id] = request, request.num_output_tokens
        waits = {request.tenant for request in engine.requests.values() if request.status is not RequestStatus.RUNNING}
        self._compare(sorted(waits))

    def _compare(self, waiting: Sequence[str]) -> None:
        leads = {pair: self.of[pair[0]] - self.of[pair[1]] for pair in combinations(waiting, 2)}
        before = self._leads
        self._leads = {}
        for pair, lead in leads.items():
            least, most = before.get(pair, (lead, lead))
            self._leads[pair] = min(least, lead), max(most, lead)
            self.drift = max(self.drift, self._leads[pair][1] - self._leads[pair][0])


def uneven_requests(rng: random.Random, count: int) -> list[Request]:
    """Of three tenants: long prompts, long outputs, and many more of both than the others send, all of them first."""
    shapes = {"flood": ((1, 90), (1, 40)), "prompts": ((60, 90), (1, 6)), "outputs": ((1, 8), (30, 40))}
    return [
        make_request(
            f"{tenant}{index}",
            [rng.randrange(50) for _ in range(rng.randint(*prompt))],
            rng.randint(*tokens),
            seed=index % 5,
            tenant=tenant,
        )
        for tenant, (prompt, tokens) in shapes.items()
        for index in range(count * (3 if tenant == "flood" else 1))
    ]


class FairShareContract(SchedulerChecks):
    """For schedulers that promise each tenant its share of the tokens; equal shares, under `settings`."""

    input_weight: ClassVar[float] = 1.0
    output_weight: ClassVar[float] = 2.0

    def measured(self, engine: FakeEngine, num_steps: int) -> Service:
        service = Service(self.input_weight, self.output_weight)
        for _ in range(num_steps):
            if not engine.requests:
                break
            service.take(engine, engine.step())
        return service

    @OVERLAP
    @pytest.mark.parametrize("seed", range(3))
    def test_tenants_that_wait_drift_apart_by_no_more_than_the_bound(self, seed: int, num_in_flight: int) -> None:
        """2 max(wp L, wq M), for any interval in which both have requests waiting (OSDI'24, theorem 4.4)."""
        num_blocks, rng = 24, random.Random(seed)
        engine = self.make_engine(num_blocks, num_in_flight=num_in_flight)
        requests = uneven_requests(rng, 50)
        engine.add(*requests)
        service = self.measured(engine, 10_000)
        longest = max(request.num_prompt_tokens for request in requests)
        bound = 2 * max(self.input_weight * longest, self.output_weight * num_blocks * BLOCK_SIZE)
        assert 0 < service.drift <= bound
        assert min(service.of.values()) > 2 * bound, "so short a run would keep the bound by itself"
        engine.drain()
        self.assert_complete(engine, requests)

    @OVERLAP
    def test_a_flood_takes_nothing_from_the_others(self, num_in_flight: int) -> None:
        """One of eight tenants sends ten times as much as another, and comes first."""
        engine = self.make_engine(64, num_in_flight=num_in_flight)
        rng = random.Random(1)
        flood = [make_request(f"f{index}", [rng.randrange(50)] * 20, 30, tenant="flood") for index in range(400)]
        engine.add(*flood)
        for _ in range(20):
            engine.step()
        tenants = [f"t{index}" for index in range(7)]
        for tenant in tenants:
            prompts = [[rng.randrange(50) for _ in range(rng.randint(5, 40))] for _ in range(40)]
            engine.add(*[make_request(f"{tenant}-{i}", p, 30, tenant=tenant) for i, p in enumerate(prompts)])
        service = self.measured(engine, 600)
        assert len({request.tenant for request in engine.requests.values()}) == 8, "all of them wait throughout"
        assert jain(service.of[tenant] for tenant in ["flood", *tenants]) >= 0.95

    def test_what_was_not_asked_for_is_not_saved_up(self) -> None:
        """A tenant that comes back gets no burst: from then on the two have the same."""
        engine = self.make_engine(24, Limits(max_num_running_reqs=4))
        engine.add(make_request("idle-first", [1] * 20, 10, tenant="idle"))
        busy = [make_request(f"b{index}", [index % 50] * 20, 20, tenant="busy", seed=index) for index in range(120)]
        engine.add(*busy)
        for _ in range(300):
            engine.step()
        engine.add(*[make_request(f"i{i}", [i % 50] * 20, 20, tenant="idle", seed=i) for i in range(60)])
        service = self.measured(engine, 200)
        assert {request.tenant for request in engine.requests.values()} == {"idle", "busy"}
        assert service.of["idle"] <= 1.3 * service.of["busy"]
        assert service.of["busy"] <= 1.3 * service.of["idle"]

    def test_a_lone_tenant_has_it_all(self) -> None:
        """Nobody is held back where nobody else waits (work conservation), and each tenant's requests keep their order."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=4))
        requests = [make_request(f"r{index}", [index] * 8, 8, tenant="only") for index in range(12)]
        engine.add(*requests)
        while len(engine.requests) >= 4:
            assert len(engine.step().scheduled) == 4
        engine.drain()
        assert engine.first_scheduled == [request.request_id for request in requests]
        self.assert_complete(engine, requests)
