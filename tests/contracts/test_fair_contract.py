"""`fair` keeps the scheduler contract and shares by tokens, within the bound of the paper; by turns in its other mode."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from pydantic import ValidationError

from core.batch import SchedulerOutput
from core.request import Request, RequestStatus
from core.simulation.metrics import jain
from core.testing.fair_share import FairShareContract, Service, uneven_requests
from core.testing.fakes import FakeDrafts, FakeEngine, Limits, make_request
from core.testing.scheduler import SchedulerContract
from core.testing.scheduler_checks import SchedulerChecks
from core.testing.scheduler_machine import SchedulerMachine, machine_test
from plugins.schedulers.fair import Fair
from plugins.schedulers.fcfs import Fcfs

DRAFTS = frozenset({"drafts", "jump_forward"})
ONE_SLOT = Limits(max_num_running_reqs=1)


def of(tenant: str, count: int, max_tokens: int = 8, length: int = 8) -> list[Request]:
    return [make_request(f"{tenant}{i}", [i % 50] * length, max_tokens, seed=i, tenant=tenant) for i in range(count)]


class TestFair(SchedulerContract, FairShareContract):
    component = Fair
    provides = DRAFTS

    def test_the_bound_holds_with_drafts(self) -> None:
        """Drafts that are kept cost what tokens cost, and those that are not cost nothing."""
        engine = self.make_engine(24, decode=FakeDrafts(3, 1))
        requests = uneven_requests(random.Random(7), 30)
        engine.add(*requests)
        service = self.measured(engine, 10_000)
        assert service.drift <= 2 * 2 * 24 * 16
        engine.drain()
        self.assert_complete(engine, requests)

    def test_what_a_tenant_finds_in_the_cache_costs_it_nothing(self) -> None:
        """Equal work, and one of the two has computed most of its prompts before: it gets through more requests."""
        engine = self.make_engine(200, ONE_SLOT)
        head = [1] * 80
        engine.add(make_request("warm", head, 1, tenant="cached"))
        engine.drain()
        requests = [
            make_request(f"{tenant}{i}", [*(head if tenant == "cached" else [i] * 80), i], 2, tenant=tenant)
            for tenant in ("cached", "plain")
            for i in range(40)
        ]
        engine.add(*requests)
        while len(engine.ended) < 41:
            engine.step()
        ended = Counter(request.tenant for request in engine.ended.values())
        assert ended["cached"] - 1 >= 3 * ended["plain"]

    def test_preemption_costs_a_tenant_nothing(self) -> None:
        """Tokens that are computed again are no service."""
        engine = self.make_engine(16, prefix_caching=False)
        requests = [*of("a", 40, 40, 20), *of("b", 40, 40, 20)]
        engine.add(*requests)
        service = self.measured(engine, 10_000)
        assert engine.preempted
        assert service.drift <= 2 * 2 * 16 * 16
        self.assert_complete(engine, requests)

    def test_nothing_is_kept_of_tenants_that_have_gone(self) -> None:
        """500 tenants, each with a request or two, beside one that always waits."""
        engine = self.make_engine(60, Limits(max_num_running_reqs=4))
        queue = engine.scheduler._policy._queue  # type: ignore[attr-defined]
        most, flood = 0, iter(of("flood", 4000, 2))
        for index in range(500):
            engine.add(*of(f"t{index}-", 1 + index % 2, 1 + index % 7))
            for _ in range(3):
                while sum(request.tenant == "flood" for request in engine.requests.values()) < 20:
                    engine.add(next(flood))
                engine.step()
            most = max(most, len(queue.accounts), len(queue._heap), len(queue._idle))
        assert most <= 32
        assert sum(request.tenant == "flood" for request in engine.ended.values()) > 500
        engine.abort(*list(engine.requests))
        engine.drain()
        assert (queue.accounts, queue._heap, queue._idle) == ({}, [], [])

    def test_weights_are_ratios_of_service(self) -> None:
        tiers = {"gold": {"weight": 3, "tenants": ["a"]}, "paid": {"weight": 2, "tenants": ["b", "c"]}}
        engine = Weighted.of(tiers).make_engine(24)
        engine.add(*[request for tenant in "abcd" for request in of(tenant, 150, 12, 12)])
        service = self.measured(engine, 350)
        assert {request.tenant for request in engine.requests.values()} == set("abcd")
        for tenant, weight in {"a": 3, "b": 2, "c": 2, "d": 1}.items():
            assert service.of[tenant] / weight == pytest.approx(sum(service.of.values()) / 8, rel=0.15)

    @pytest.mark.parametrize(
        ("values", "word"),
        [
            (
                {"tiers": {"a": {"weight": 1, "tenants": ["x"]}, "b": {"weight": 2, "tenants": ["x"]}}},
                "is in a and b; keep it in one of them",
            ),
            ({"tiers": {"a": {"weight": 0, "tenants": ["x"]}}}, "weight"),
            ({"tiers": {"a": {"weight": 1, "tenants": []}}}, "tenants"),
            ({"mode": "round_robin", "displace_after": 5}, "scheduler.mode=tokens"),
            (
                {"mode": "round_robin", "input_weight": 2, "output_weight": 2},
                "scheduler.mode=round_robin .* scheduler.input_weight and scheduler.output_weight, .* scheduler.mode=tokens",
            ),
            ({"mode": "round_robin", "output_weight": 3}, "leave out scheduler.output_weight, or"),
            ({"max_preemptions": 3}, "scheduler.max_preemptions .* scheduler.displace_after"),
            ({"output_weight": 0}, "output_weight"),
            ({"mode": "lottery"}, "mode"),
        ],
    )
    def test_settings_that_cannot_be_meant_are_refused(self, values: dict[str, object], word: str) -> None:
        with pytest.raises(ValidationError, match=word):
            Fair.Settings.model_validate(values)


class Weighted(SchedulerChecks):
    component = Fair

    @classmethod
    def of(cls, tiers: object, **values: object) -> SchedulerChecks:
        return type("WeightedFair", (SchedulerChecks,), {"component": Fair, "settings": {"tiers": tiers, **values}})()


class TestFirstComeIsNotFair(SchedulerChecks):
    """The traffic of the contract tells a scheduler that shares from one that does not."""

    component = Fcfs

    def test_the_bound_is_broken(self) -> None:
        engine, service = self.make_engine(24), Service()
        engine.add(*uneven_requests(random.Random(0), 50))
        while engine.requests:
            service.take(engine, engine.step())
        assert service.drift > 2 * 2 * 24 * 16

    def test_a_flood_takes_it_all(self) -> None:
        engine, service = self.make_engine(64), Service()
        engine.add(*of("flood", 400, 30, 20), *[request for i in range(7) for request in of(f"t{i}-", 40, 30, 20)])
        for _ in range(600):
            service.take(engine, engine.step())
        assert jain(service.of[tenant] for tenant in ["flood", *(f"t{i}-" for i in range(7))]) < 0.3


class TestDisplacing(SchedulerContract, FairShareContract):
    component = Fair
    provides = DRAFTS
    settings = {"displace_after": 40}

    def test_a_tenant_need_not_wait_for_the_end_of_long_requests(self) -> None:
        engine = self.make_engine(200, Limits(max_num_running_reqs=4))
        flood = of("flood", 12, 200)
        engine.add(*flood)
        for _ in range(10):
            engine.step()
        light = make_request("light", [9] * 10, 10, tenant="light")
        engine.add(light)
        for _ in range(9):  # 4 slots earn 8 a step; it lags by 40 and its prompt's 10 in 7 steps
            engine.step()
        assert light.status is RequestStatus.RUNNING
        assert engine.preempted == ["flood3"]
        engine.drain()
        self.assert_complete(engine, [*flood, light])

    def test_nobody_is_pushed_out_by_a_tenant_with_as_many_slots(self) -> None:
        engine = self.make_engine(400, Limits(max_num_running_reqs=4))
        requests = [*of("a", 2, 100), *of("b", 2, 100), *of("a-", 6, 100), *of("b-", 6, 100)]
        for request in requests:
            request.tenant = request.tenant[:1]
        engine.add(*requests)
        engine.drain()
        assert engine.preempted == []
        self.assert_complete(engine, requests)

    @pytest.mark.parametrize("num_blocks", [12, 30, 200])
    def test_no_request_gives_way_again_and_again(self, num_blocks: int) -> None:
        engine = self.make_engine(num_blocks, Limits(max_num_running_reqs=4))
        rng = random.Random(num_blocks)
        requests = of("flood", 20, 60, 20)
        engine.add(*requests)
        for index in range(60):
            request = make_request(f"t{index}", [rng.randrange(50)] * rng.randint(1, 60), 5, tenant=f"t{index % 6}")
            requests.append(request)
            engine.add(request)
            for _ in range(rng.randrange(6)):
                engine.step()
        engine.drain()
        assert engine.preempted
        if num_blocks == 200:  # only tenants push out
            assert max(request.num_preemptions for request in requests) <= 2
        self.assert_complete(engine, requests)

    def test_a_prompt_that_costs_more_than_the_lag_does_not_swing_the_balance_back(self) -> None:
        """Its tenant would be ahead once it is charged, and be pushed out in turn."""
        engine = self.make_engine(200, Limits(max_num_running_reqs=2))
        requests = [*of("a", 6, 60), *of("b", 6, 60, 300)]
        engine.add(*requests)
        engine.drain()
        assert max(request.num_preemptions for request in requests) <= 1
        self.assert_complete(engine, requests)


class TestRoundRobin(SchedulerContract):
    component = Fair
    provides = DRAFTS
    settings = {
        "mode": "round_robin",
        "tiers": {"gold": {"weight": 3, "tenants": ["g1", "g2"]}, "silver": {"weight": 1, "tenants": ["s"]}},
    }

    def test_tiers_take_turns_by_weight(self) -> None:
        engine = self.make_engine(60, ONE_SLOT)
        engine.add(*of("s", 30, 2), *of("other", 30, 2), *of("g1", 15, 9), *of("g2", 15, 9))
        while len(engine.first_scheduled) < 25:
            engine.step()
        order = ["g" if name[0] == "g" else name[0] for name in engine.first_scheduled]
        assert Counter(order) == {"g": 15, "s": 5, "o": 5}
        for start in range(5, 20, 5):  # in each turn, not in the long run alone
            assert Counter(order[start : start + 5]) == {"g": 3, "s": 1, "o": 1}

    def test_a_tier_is_first_come_first_served(self) -> None:
        engine = self.make_engine(60, Limits(max_num_running_reqs=2))
        requests = [make_request(f"r{i}", [i] * 5, 4, tenant=random.Random(i).choice(["g1", "g2"])) for i in range(20)]
        engine.add(*requests)
        engine.drain()
        assert engine.first_scheduled == [request.request_id for request in requests]

    def test_a_tier_that_comes_back_has_no_turns_to_make_up_for(self) -> None:
        engine = self.make_engine(60, ONE_SLOT)
        engine.add(*of("s", 60, 2))
        while len(engine.ended) < 20:
            engine.step()
        engine.add(*of("other", 20, 2))
        before = len(engine.first_scheduled)
        while len(engine.first_scheduled) < before + 10:
            engine.step()
        assert 4 <= sum(name.startswith("other") for name in engine.first_scheduled[before:]) <= 6


class FairMachine(SchedulerMachine):
    """Within a tenant, requests are first scheduled in order of arrival; no state outlives its requests."""

    checks = TestFair

    def after_step(self, output: SchedulerOutput) -> None:
        engine: FakeEngine = self.engine
        policy = engine.scheduler._policy  # type: ignore[attr-defined]
        waiting = {name for name, one in engine.requests.items() if one.status is not RequestStatus.RUNNING}
        for account in policy._queue.accounts.values():
            names = [request.request_id for request in account.waiting.values()]
            assert names == [name for name in self.added if name in names]
            waiting -= set(names)
        assert not waiting

    def after_all(self) -> None:
        names: dict[str, list[str]] = {}
        for name in self.engine.first_scheduled:
            request = self.engine.ended[name]
            if not self.held_back(request):
                names.setdefault(request.tenant, []).append(name)
        place = {name: index for index, name in enumerate(self.added)}
        for started in names.values():
            assert started == sorted(started, key=place.__getitem__)
        policy = self.engine.scheduler._policy  # type: ignore[attr-defined]
        assert not policy._members and not policy._running and not policy._queue.accounts


class DisplacingMachine(FairMachine):
    checks = TestDisplacing


class RoundRobinMachine(SchedulerMachine):
    checks = TestRoundRobin


TestFairMachine = machine_test(FairMachine)
TestDisplacingMachine = machine_test(DisplacingMachine)
TestRoundRobinMachine = machine_test(RoundRobinMachine, max_examples=30)
