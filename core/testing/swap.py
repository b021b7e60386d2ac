"""What a KV cache that provides `swap` must do, as tests::

class TestMine(CacheContract, SwapContract):
    component = Mine
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from core.cache.kv_cache import CacheContext, KVCache
from core.request import Request
from core.testing.contract import Contract
from core.testing.fakes import make_request

NOTHING = -1


class FakeKV:
    """What blocks hold on the device and in host memory: a token id per slot. Copies are made as an executor makes them."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._size = cache.block_size
        self.device = {block: [NOTHING] * self._size for block in range(cache.num_blocks)}
        self.host: dict[int, list[int]] = {}
        self.num_copied = {"out": 0, "in": 0}

    def copy(self) -> None:
        """All copies that are due. Each in one go: its sources are read before a target is written."""
        for copy in self._cache.take_copies():
            assert len(copy.device_blocks) == len(copy.host_blocks) > 0
            assert set(copy.device_blocks) <= self.device.keys(), "there is no such device block"
            assert set(copy.host_blocks) <= set(range(self._cache.num_swap_blocks)), "there is no such host block"
            self.num_copied[copy.direction] += len(copy.host_blocks)
            if copy.direction == "out":
                assert len(set(copy.host_blocks)) == len(copy.host_blocks), "two blocks go to one host block"
                self.host |= {
                    h: list(self.device[d]) for d, h in zip(copy.device_blocks, copy.host_blocks, strict=True)
                }
            else:
                assert len(set(copy.device_blocks)) == len(copy.device_blocks), "two blocks come to one device block"
                for d, h in zip(copy.device_blocks, copy.host_blocks, strict=True):
                    assert h in self.host, "a host block comes back that was never written"
                    self.device[d] = list(self.host[h])

    def write(self, request: Request, start: int, end: int) -> None:
        for position, token_id in zip(range(start, end), request.token_ids(start, end), strict=True):
            self.device[request.block_table[position // self._size]][position % self._size] = token_id

    def assert_holds(self, request: Request, num_tokens: int) -> None:
        found = [self.device[request.block_table[p // self._size]][p % self._size] for p in range(num_tokens)]
        assert found == request.token_ids(0, num_tokens), f"{request.request_id} reads KV that is not its own"


class SwapContract(Contract):
    """KV that goes to host memory comes back as it was; no host block is lost, and none is two requests'."""

    def make_swapping(self, num_blocks: int = 16, num_swap_blocks: int = 16) -> tuple[KVCache, FakeKV]:
        cache: KVCache = self.make(CacheContext(num_blocks, 1024, num_swap_blocks))
        return cache, FakeKV(cache)

    def begin(self, cache: KVCache, kv: FakeKV, name: str, prompt: Sequence[int], **fields: Any) -> Request:
        """A request with all but its last token computed."""
        request = make_request(name, prompt, **fields)
        found = cache.lookup(request)
        assert cache.allocate(request, request.num_tokens)
        kv.copy()
        kv.assert_holds(request, found)
        self.compute(cache, kv, request, found)
        return request

    def compute(self, cache: KVCache, kv: FakeKV, request: Request, start: int) -> None:
        request.num_computed_tokens = request.num_tokens - 1
        kv.write(request, start, request.num_computed_tokens)
        cache.commit(request)
        cache.check()

    def flood(self, cache: KVCache, kv: FakeKV) -> None:
        """Others use all free blocks, and write to them."""
        flood = make_request("flood", [49] * (cache.num_free_blocks * cache.block_size))
        assert cache.allocate(flood, flood.num_tokens)
        kv.copy()
        kv.write(flood, 0, flood.num_tokens)
        cache.free(flood)
        cache.check()

    def prompt(self, cache: KVCache, num_blocks: int, extra: int = 0, first: int = 0) -> list[int]:
        return list(range(first, first + num_blocks * cache.block_size + extra))

    def test_it_has_the_host_blocks_that_it_was_given(self) -> None:
        cache, _ = self.make_swapping(num_swap_blocks=5)
        assert (cache.num_swap_blocks, cache.num_free_swap_blocks) == (5, 5)
        assert list(cache.take_copies()) == []

    def test_what_goes_out_comes_back(self) -> None:
        cache, kv = self.make_swapping()
        request = self.begin(cache, kv, "a", self.prompt(cache, 2, extra=3))
        num_tokens = request.num_computed_tokens
        assert cache.swap_out(request, num_tokens) == num_tokens
        assert (request.block_table, cache.num_free_blocks) == ([], 16)
        assert cache.num_swapped_tokens(request) == num_tokens
        assert cache.num_free_swap_blocks <= 16 - 3
        kv.copy()
        self.flood(cache, kv)
        assert cache.swap_in(request) == num_tokens
        assert len(request.block_table) == 3
        kv.copy()
        kv.assert_holds(request, num_tokens)
        assert cache.num_swapped_tokens(request) == 0
        cache.free(request)
        cache.check()
        assert (cache.num_free_blocks, cache.num_free_swap_blocks) == (16, 16)

    def test_a_block_goes_out_and_in_and_on_within_a_step(self) -> None:
        """Copies are made in the order in which they were noted, after several calls."""
        cache, kv = self.make_swapping(num_blocks=4, num_swap_blocks=8)
        names = {"a": 0, "b": 500}
        held = {}
        for name, first in names.items():
            held[name] = self.begin(cache, kv, name, self.prompt(cache, 3, extra=2, first=first))
            assert cache.swap_out(held[name], held[name].num_computed_tokens)
        for name in ("a", "b", "a", "b"):
            assert cache.swap_in(held[name]) == held[name].num_tokens - 1
            assert cache.swap_out(held[name], held[name].num_tokens - 1) == held[name].num_tokens - 1
        assert cache.swap_in(held["a"]) == held["a"].num_tokens - 1
        kv.copy()
        kv.assert_holds(held["a"], held["a"].num_tokens - 1)
        cache.check()

    def test_a_request_without_room_waits_and_loses_nothing(self) -> None:
        cache, kv = self.make_swapping(num_blocks=4)
        request = self.begin(cache, kv, "a", self.prompt(cache, 3))
        num_tokens = request.num_computed_tokens
        cache.swap_out(request, num_tokens)
        other = make_request("other", [1])
        assert cache.allocate(other, 2 * cache.block_size)
        for _ in range(3):
            assert cache.swap_in(request) is None
            assert (request.block_table, cache.num_free_blocks) == ([], 2)
            assert cache.num_swapped_tokens(request) == num_tokens
            cache.check()
        kv.copy()
        cache.free(other)
        self.flood(cache, kv)
        assert cache.swap_in(request) == num_tokens
        kv.copy()
        kv.assert_holds(request, num_tokens)

    def test_a_head_is_kept_where_all_does_not_fit(self) -> None:
        cache, kv = self.make_swapping(num_swap_blocks=2)
        request = self.begin(cache, kv, "a", self.prompt(cache, 3, extra=5))
        assert cache.swap_out(request, request.num_computed_tokens) == 2 * cache.block_size
        assert cache.num_free_blocks == 16
        kv.copy()
        self.flood(cache, kv)
        other = self.begin(cache, kv, "b", self.prompt(cache, 1, extra=5, first=500))
        assert cache.swap_out(other, other.num_computed_tokens) == 0, "host memory is full"
        assert (other.block_table, cache.num_swapped_tokens(other)) == ([], 0)
        restored = cache.swap_in(request)
        assert restored == 2 * cache.block_size
        assert cache.allocate(request, request.num_tokens)
        kv.copy()
        kv.assert_holds(request, restored)
        self.compute(cache, kv, request, restored)
        kv.assert_holds(request, request.num_computed_tokens)

    def test_without_host_memory_nothing_is_kept(self) -> None:
        cache, kv = self.make_swapping(num_swap_blocks=0)
        request = self.begin(cache, kv, "a", self.prompt(cache, 2, extra=1))
        assert cache.swap_out(request, request.num_computed_tokens) == 0
        assert (request.block_table, cache.num_free_blocks, cache.num_swapped_tokens(request)) == ([], 16, 0)
        assert list(cache.take_copies()) == []
        cache.check()

    def test_drafts_that_were_rejected_are_not_restored(self) -> None:
        """Preempted with a step of two drafts in flight, which brings one token."""
        cache, kv = self.make_swapping()
        request = self.begin(cache, kv, "a", self.prompt(cache, 1, extra=cache.block_size - 1))
        num_tokens = request.num_tokens
        assert cache.allocate(request, num_tokens + 2)
        assert cache.swap_out(request, num_tokens + 2) == num_tokens + 2
        request.append_output([7])
        assert cache.num_swapped_tokens(request) == num_tokens
        assert cache.swap_in(request) == num_tokens
        assert len(request.block_table) == -(-num_tokens // cache.block_size)
        cache.check()

    def test_an_end_while_swapped_gives_everything_back(self) -> None:
        cache, kv = self.make_swapping()
        for discard in (False, True):
            request = self.begin(cache, kv, "a", self.prompt(cache, 2, extra=3))
            cache.swap_out(request, request.num_computed_tokens)
            cache.free(request, discard=discard)
            cache.free(request, discard=discard)
            assert cache.num_swapped_tokens(request) == 0
            assert (cache.num_free_blocks, cache.num_free_swap_blocks) == (16, 16)
            cache.check()
            kv.copy()

    def test_a_shared_prefix_outlives_those_who_use_it(self) -> None:
        """Each of three is swapped out while others run; at the end the device has nothing of it."""
        cache, kv = self.make_swapping()
        head = self.prompt(cache, 2)
        requests = [self.begin(cache, kv, name, [*head, index, index]) for index, name in enumerate("abc")]
        for request in requests:
            assert cache.swap_out(request, request.num_computed_tokens) == request.num_computed_tokens
            kv.copy()
            cache.check()
        self.flood(cache, kv)
        if requests[0].block_hashes:
            assert kv.num_copied["out"] <= 2 + 3, "a shared prefix is copied twice"
        for request in requests:
            restored = cache.swap_in(request)
            assert restored == request.num_tokens - 1
            kv.copy()
            kv.assert_holds(request, restored)
            cache.check()
        tails = [request.block_table[-1] for request in requests]
        assert len(set(tails)) == 3, "a block that is still written to is shared"

    @pytest.mark.parametrize("num_swap_blocks", [2, 5, 30])
    def test_requests_come_and_go_in_any_order(self, num_swap_blocks: int) -> None:
        """Start, decode, out, in, end and failure at random: what a request reads is always its own."""
        rng = random.Random(num_swap_blocks)
        cache, kv = self.make_swapping(num_blocks=12, num_swap_blocks=num_swap_blocks)
        heads = [self.prompt(cache, 2, first=first) for first in (0, 500)]
        running: list[Request] = []
        swapped: list[Request] = []
        for number in range(400):
            act = rng.random()
            if act < 0.3 and len(running) < 4 and cache.num_free_blocks >= 4:
                prompt = [*rng.choice(heads)[: cache.block_size * rng.randint(0, 2)], number, number + 1]
                running.append(self.begin(cache, kv, f"r{number}", prompt, tenant=rng.choice(["", "t"])))
            elif act < 0.5 and running:
                self._out(cache, running, swapped, rng)
            elif act < 0.7 and swapped:
                self._in(cache, kv, running, swapped, rng)
            elif act < 0.85 and running:
                self._decode(cache, kv, rng.choice(running), number)
            elif running or swapped:
                group = rng.choice([group for group in (running, swapped) if group])
                cache.free(group.pop(rng.randrange(len(group))), discard=rng.random() < 0.2)
            cache.check()
        for request in [*running, *swapped]:
            cache.free(request)
        cache.check()
        assert (cache.num_free_blocks, cache.num_free_swap_blocks) == (12, num_swap_blocks)

    def _out(self, cache: KVCache, running: list[Request], swapped: list[Request], rng: random.Random) -> None:
        request = running.pop(rng.randrange(len(running)))
        kept = cache.swap_out(request, request.num_computed_tokens)
        assert 0 <= kept <= request.num_computed_tokens
        assert kept == cache.num_swapped_tokens(request)
        if kept:
            swapped.append(request)

    def _in(
        self, cache: KVCache, kv: FakeKV, running: list[Request], swapped: list[Request], rng: random.Random
    ) -> None:
        request = rng.choice(swapped)
        least, free = cache.num_swapped_tokens(request), cache.num_free_blocks
        restored = cache.swap_in(request)
        if restored is None:
            assert free < -(-request.num_tokens // cache.block_size), "there was room for all of it"
            return
        assert least <= restored < request.num_tokens
        swapped.remove(request)
        if not cache.allocate(request, request.num_tokens):
            cache.free(request)
            return
        running.append(request)
        kv.copy()
        kv.assert_holds(request, restored)
        self.compute(cache, kv, request, restored)

    def _decode(self, cache: KVCache, kv: FakeKV, request: Request, token_id: int) -> None:
        if cache.allocate(request, request.num_tokens + 1):
            kv.copy()
            kv.assert_holds(request, request.num_computed_tokens)
            start = request.num_computed_tokens
            request.append_output([token_id])
            self.compute(cache, kv, request, start)
