"""The queues and the block arithmetic under the shared scheduling mechanism."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pydantic import BaseModel, ValidationError

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.request import Request, RequestStatus
from core.scheduling.blocks import BlockBudget
from core.scheduling.expiry import Expiry
from core.scheduling.policy import Policy
from core.scheduling.preempted_kv import PreemptedKV
from core.scheduling.queues import Queues
from core.scheduling.swap_cost import SwapCost
from core.testing.engines import paged_cache
from core.testing.fakes import make_request
from plugins.schedulers.fair import Fair
from plugins.schedulers.priority import Priority
from plugins.schedulers.slo import Slo


@pytest.fixture
def requests() -> list[Request]:
    return [make_request(name, [1, 2, 3]) for name in "abcd"]


@pytest.fixture
def queues(requests: list[Request]) -> Queues:
    queues = Queues()
    for request in requests:
        queues.add(request)
    return queues


def names(requests: Iterable[Request]) -> str:
    return "".join(request.request_id for request in requests)


def test_both_queues_keep_the_order_of_add(queues: Queues, requests: list[Request]) -> None:
    a, b, c, d = requests
    for request in (d, b, a):
        queues.start(request)
    queues.settle((d, b, a))
    assert (names(queues.running), names(queues.waiting)) == ("abd", "c")
    assert [entry.request for entry in queues.lanes] == queues.running
    queues.preempt(b, RequestStatus.PREEMPTED)
    assert (names(queues.running), names(queues.waiting)) == ("ad", "bc")
    assert [r.status for r in requests] == [
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
    ]


def test_a_policy_ranks_both_queues_and_equals_keep_the_order_of_add() -> None:
    class ByPriority(Policy):
        def rank(self, request: Request) -> int:
            return request.priority

    queues = Queues(ByPriority())
    requests = [make_request(name, [1], priority=level) for name, level in zip("abcd", (1, 0, 1, 0), strict=True)]
    for request in requests:
        queues.add(request)
    assert names(queues.waiting) == "bdac"
    for request in requests:
        queues.start(request)
    queues.settle(requests)
    assert (names(queues.running), names(queues.waiting)) == ("bdac", "")


def test_swapped_requests_are_counted() -> None:
    queues = Queues()
    one, two = make_request("one", [1]), make_request("two", [1])
    for request in (one, two):
        queues.add(request)
        queues.start(request)
        queues.settle([request])
        queues.preempt(request, RequestStatus.SWAPPED)
    assert queues.num_swapped == 2
    queues.remove(one)
    queues.start(two)
    queues.settle([two])
    assert queues.num_swapped == 0 and queues.running == [two]


def test_deadlines_are_those_of_requests_that_were_never_scheduled() -> None:
    late, later, none, scheduled, ended = requests = [
        make_request(name, [1], deadline=deadline)
        for name, deadline in zip("abcde", (5.0, 9.0, None, 4.0, 4.5), strict=True)
    ]
    live = {request.request_id: request for request in requests}
    expiry = Expiry(live.get)
    for request in requests:
        expiry.add(request)
    scheduled.first_scheduled_time = 1.0
    live["e"] = make_request("e", [1], deadline=50.0)  # the id of one that has ended
    assert expiry.pop_due(4.5) == [] and expiry.pop_due(5.0) == [late] and expiry.pop_due(100.0) == [later]
    assert not expiry


def test_deadlines_keep_nothing_of_what_has_ended() -> None:
    live: dict[str, Request] = {}
    expiry = Expiry(live.get)
    for index in range(10_000):
        request = live["r"] = make_request(f"r{index}", [1], deadline=1e9)
        expiry.add(request)
    assert len(expiry._heap) <= 1024


def test_what_is_removed_is_unknown_and_its_id_is_free(queues: Queues, requests: list[Request]) -> None:
    a, b, *_ = requests
    queues.start(a)
    queues.settle([a])
    queues.remove(a)
    queues.remove(b)
    assert (names(queues.running), names(queues.waiting)) == ("", "cd")
    assert "a" not in queues and "c" in queues
    assert names(queues.find(["d", "a", "d", "c"])) == "dc"
    again = make_request("a", [1])
    queues.add(again)
    assert names(queues.waiting) == "cda" and queues.entry(again).preempted_step == 0


def test_blocks_that_lack() -> None:
    cache = paged_cache(4)
    budget = BlockBudget(cache)
    size = cache.block_size
    assert [budget.num_needed(n) for n in (1, size, size + 1)] == [1, 1, 2]
    holder, other = make_request("a", list(range(3 * size))), make_request("b", [1])
    assert cache.allocate(holder, 3 * size)
    assert budget.num_missing(holder, 4 * size) == 0
    assert budget.num_missing(other, 2 * size) == 1


def test_victims_are_chosen_in_order_until_blocks_and_slots_suffice() -> None:
    cache = paged_cache(6)
    budget = BlockBudget(cache)
    first, second, third = (make_request(name, [ord(name)] * 32) for name in "abc")
    for request, num_blocks in ((first, 1), (second, 3), (third, 2)):
        assert cache.allocate(request, num_blocks * cache.block_size)
    victims = [first, second, third]
    assert names(budget.choose(victims, 1, 0)) == "a"
    assert names(budget.choose(victims, 3, 0)) == "ab"
    assert names(budget.choose(victims, 1, 2)) == "ab"
    assert budget.choose(victims, 7, 0) == []
    assert budget.choose(victims, 0, 4) == []


def test_a_victim_whose_blocks_others_hold_is_passed_over() -> None:
    cache = paged_cache(8)
    prompt = list(range(32))
    sharing = [make_request(name, prompt + [200]) for name in "ab"]
    assert cache.allocate(sharing[0], 32)
    cache.commit(sharing[0], 32)
    assert cache.lookup(sharing[1]) == 32
    alone = make_request("c", [7])
    assert cache.allocate(alone, 1)
    assert names(BlockBudget(cache).choose([*sharing, alone], 1, 0)) == "c"


@pytest.mark.parametrize(("num_shared", "kept_as"), [(0, RequestStatus.SWAPPED), (3, RequestStatus.PREEMPTED)])
def test_what_others_hold_too_is_priced_neither_as_a_copy_nor_as_work(num_shared: int, kept_as: RequestStatus) -> None:
    """Copies are a fifth cheaper for whole blocks; of the last block alone, with a token in it, they are not."""
    cache = PagedCache(PagedCache.Settings(), CacheContext(16, 1024, num_swap_blocks=8))
    prompt = list(range(16 * 3 + 1))
    other = make_request("other", prompt[: 16 * num_shared + 1])
    assert cache.allocate(other, other.num_tokens)
    other.num_computed_tokens = other.num_tokens
    cache.commit(other)
    request = make_request("a", prompt)
    assert cache.lookup(request) == 16 * num_shared
    assert cache.allocate(request, len(prompt))
    request.num_computed_tokens = len(prompt)
    kv = PreemptedKV(cache, "auto", SwapCost(copy_s_per_block=0.5, prefill_s_per_token=0.09))
    assert kv.give_up(request) is kept_as


def test_blocks_that_are_reserved_and_not_written_are_not_priced() -> None:
    """A prompt of which one chunk is computed."""
    cache = PagedCache(PagedCache.Settings(), CacheContext(16, 1024, num_swap_blocks=8))
    request = make_request("a", list(range(160)))
    assert cache.allocate(request, 160)
    request.num_computed_tokens = 32
    kv = PreemptedKV(cache, "auto", SwapCost(copy_s_per_block=0.5, prefill_s_per_token=0.09))
    assert kv.give_up(request) is RequestStatus.SWAPPED
    assert kv.num_to_compute(request) == 128


@pytest.mark.parametrize("settings", [Fair.Settings, Priority.Settings, Slo.Settings])
def test_tiers_of_all_schedulers_keep_tenants_apart(settings: type[BaseModel]) -> None:
    own = {"weight": 1} if settings is Fair.Settings else {"level": 1} if settings is Priority.Settings else {}
    one, two = ({"tenants": tenants, **own} for tenants in (["x", "y", "x"], ["z"]))
    assert settings.model_validate({"tiers": {"one": one, "two": two}})
    with pytest.raises(ValidationError, match="the tenant 'y' is in one and two; keep it in one"):
        settings.model_validate({"tiers": {"one": one, "two": {**two, "tenants": ["z", "y"]}}})
    with pytest.raises(ValidationError, match="tenants"):
        settings.model_validate({"tiers": {"one": {**one, "tenants": []}}})
