"""Preempted KV in host memory: books, copies, and what becomes of requests whose copies fail (F52)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.cache.kv_cache import CacheContext, KVCopy
from core.cache.paged import PagedCache
from core.cache.swap import Copies
from core.request import Request
from core.testing.fakes import make_request
from core.testing.swap import FakeKV

SIZE = 16


def make_cache(num_blocks: int = 8, num_swap_blocks: int = 8, **settings: Any) -> PagedCache:
    return PagedCache(PagedCache.Settings(**settings), CacheContext(num_blocks, 1024, num_swap_blocks))


def started(cache: PagedCache, name: str, prompt: list[int], **fields: Any) -> Request:
    """All but the last token computed and written."""
    request = make_request(name, prompt, **fields)
    cache.lookup(request)
    assert cache.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens - 1
    cache.commit(request)
    cache.check()
    return request


def swap_out(cache: PagedCache, request: Request) -> int:
    kept = cache.swap_out(request, request.num_computed_tokens)
    cache.check()
    return kept


def pairs(copies: tuple[KVCopy, ...]) -> list[tuple[str, int, int]]:
    return [
        (copy.direction, device, host)
        for copy in copies
        for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True)
    ]


def test_copies_are_merged_as_far_as_their_order_allows() -> None:
    copies = Copies()
    for direction, device, host in (
        ("out", 1, 5),
        ("out", 2, 6),
        ("in", 3, 5),
        ("in", 4, 6),
        ("in", 3, 7),
        ("out", 3, 5),
    ):
        copies.add(direction, device, host)  # type: ignore[arg-type]
    assert copies.take() == (
        KVCopy("out", (1, 2), (5, 6)),
        KVCopy("in", (3, 4), (5, 6)),
        KVCopy("in", (3,), (7,)),  # block 3 once more: the order decides what it holds
        KVCopy("out", (3,), (5,)),
    )
    assert copies.take() == ()


def test_content_is_copied_only_when_the_device_is_about_to_lose_it() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    table = list(a.block_table)
    assert swap_out(cache, a) == 39
    assert a.block_table == []
    assert cache.num_free_blocks == 8
    assert cache.num_free_swap_blocks == 8 - 3
    ((direction, device, _),) = pairs(cache.take_copies())  # its tail, which nobody else could find
    assert (direction, device) == ("out", table[2])
    assert cache.swap_in(a) == 39
    ((direction, device, _),) = pairs(cache.take_copies())
    assert (direction, device) == ("in", a.block_table[2])
    assert a.block_table[:2] == table[:2], "what is still there is not copied"
    assert cache.num_free_swap_blocks == 8
    cache.check()


def test_content_that_is_evicted_goes_to_its_host_block_and_comes_back() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    first, second, tail = a.block_table
    swap_out(cache, a)
    taker = make_request("taker", [1])
    assert cache.allocate(taker, 8 * SIZE)
    out = pairs(cache.take_copies())
    assert [device for _, device, _ in out] == [tail, second, first], "a sequence is evicted from its tail"
    assert cache.swap_in(a) is None, "no block is free"
    assert (a.block_table, cache.num_swapped_tokens(a)) == ([], 39)
    cache.check()
    cache.free(taker)
    assert cache.swap_in(a) == 39
    host = {device: host for _, device, host in out}
    assert pairs(cache.take_copies()) == [
        ("in", now, host[before]) for now, before in zip(a.block_table, (first, second, tail), strict=True)
    ]
    cache.check()


def test_a_shared_prefix_is_copied_once_each_way() -> None:
    """Neither out when others use it, nor when the host has it, nor back when it is there again."""
    cache = make_cache(num_blocks=12)
    prompt = list(range(32))
    a, b, c = (started(cache, name, [*prompt, token, token]) for name, token in (("a", 50), ("b", 51), ("c", 52)))
    for request in (a, b):
        assert swap_out(cache, request) == 33
        assert [direction for direction, *_ in pairs(cache.take_copies())] == ["out"], "the tail alone"
    assert cache.num_free_swap_blocks == 8 - 2 - 2, "a host block is set aside once for each content"
    swap_out(cache, c)
    taker = make_request("taker", [1])
    cache.allocate(taker, 12 * SIZE)
    assert [direction for direction, *_ in pairs(cache.take_copies())] == ["out"] * 3, "its tail and the prefix"
    cache.free(taker)
    copied = []
    for request in (c, a, b):
        assert cache.swap_in(request) == 33
        copied.append(len(pairs(cache.take_copies())))
    assert copied == [3, 1, 1]
    assert len({tuple(request.block_table[:2]) for request in (a, b, c)}) == 1
    assert len({request.block_table[2] for request in (a, b, c)}) == 3
    cache.check()


def test_content_that_others_use_outlives_them() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    b = started(cache, "b", list(range(40)))
    swap_out(cache, a)
    cache.free(b)
    taker = make_request("taker", [1])
    cache.allocate(taker, 8 * SIZE)
    assert len(pairs(cache.take_copies())) == 3
    cache.free(taker)
    assert cache.swap_in(a) == 39
    cache.check()


def test_a_request_that_goes_out_again_leaves_its_head_where_it_was() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    swap_out(cache, a)
    taker = make_request("taker", [1])
    cache.allocate(taker, 8 * SIZE)
    cache.free(taker)
    cache.swap_in(a)
    cache.take_copies()
    assert cache.num_free_swap_blocks == 8, "nobody needs what the host has still"
    swap_out(cache, a)
    cache.allocate(taker, 8 * SIZE)
    assert len(pairs(cache.take_copies())) == 1, "the tail alone"
    cache.check()


@pytest.mark.parametrize(("num_swap_blocks", "kept"), [(0, 0), (1, 16), (2, 32), (3, 39)])
def test_the_longest_head_that_fits_is_kept(num_swap_blocks: int, kept: int) -> None:
    cache = make_cache(num_swap_blocks=num_swap_blocks)
    a = started(cache, "a", list(range(40)))
    assert swap_out(cache, a) == kept
    assert cache.num_swapped_tokens(a) == kept
    taker = make_request("taker", [1])
    cache.allocate(taker, 8 * SIZE)
    cache.free(taker)
    assert cache.swap_in(a) == kept
    assert len(a.block_table) == -(-kept // SIZE)
    cache.check()


def test_what_the_device_has_beyond_the_head_that_was_kept_is_found() -> None:
    cache = make_cache(num_swap_blocks=1)
    a = started(cache, "a", list(range(70)))
    assert swap_out(cache, a) == 16
    assert cache.swap_in(a) == 64
    assert pairs(cache.take_copies()) == []
    cache.check()


def test_without_sharing_all_blocks_are_the_requests_own() -> None:
    cache = make_cache(enable_prefix_caching=False)
    a = started(cache, "a", list(range(40)))
    assert swap_out(cache, a) == 39
    assert len(pairs(cache.take_copies())) == 3
    assert cache.swap_in(a) == 39
    assert len(pairs(cache.take_copies())) == 3
    cache.check()


def test_positions_of_a_step_in_flight_are_kept_and_rejected_drafts_are_not_restored() -> None:
    """Two drafts in flight at preemption; the step brings one token."""
    cache = make_cache()
    a = started(cache, "a", list(range(31)))
    a.num_pending_tokens, a.draft_token_ids = 3, [1, 2]
    cache.allocate(a, 33)
    assert cache.swap_out(a, 33) == 33
    a.append_output([5])
    a.num_pending_tokens, a.draft_token_ids = 0, []
    assert cache.num_swapped_tokens(a) == 31
    assert cache.swap_in(a) == 31
    assert len(a.block_table) == 2
    cache.check()


def test_a_block_that_others_read_is_not_the_one_to_go_on_in() -> None:
    """Its last known token is computed again, in a block that others may find: so that block is the request's own."""
    cache = make_cache()
    a = started(cache, "a", list(range(32)))
    cache.commit(a, 32)
    assert cache.swap_out(a, 32) == 32
    assert cache.num_swapped_tokens(a) == 16
    assert cache.swap_in(a) == 16
    assert len(a.block_table) == 1
    cache.check()


def test_what_a_request_had_found_is_found_after_it_was_swapped_and_failed() -> None:
    cache = make_cache()
    started(cache, "good", list(range(17)))
    a = started(cache, "a", list(range(40)))
    swap_out(cache, a)
    cache.swap_in(a)
    cache.free(a, discard=True)
    cache.check()
    assert cache.lookup(make_request("b", list(range(40)))) == 16


def test_what_was_written_across_a_reset_is_not_found_after_a_swap() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    cache.reset()
    assert swap_out(cache, a) == 39
    assert cache.swap_in(a) == 39
    assert cache.allocate(a, 60)
    a.append_output(list(range(40, 60)))
    cache.commit(a, 59)
    cache.check()
    assert cache.lookup(make_request("b", list(range(60)))) == 0


def test_a_request_that_ends_in_host_memory_gives_its_blocks_back() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    swap_out(cache, a)
    cache.free(a)
    cache.free(a)
    assert cache.num_free_swap_blocks == 8
    assert cache.num_swapped_tokens(a) == 0
    cache.check()


@pytest.mark.parametrize("evicted", [False, True])
def test_what_a_failed_request_wrote_is_found_by_nobody(evicted: bool) -> None:
    cache = make_cache()
    started(cache, "good", list(range(17)))
    a = started(cache, "a", list(range(40)))
    b = started(cache, "b", list(range(40)))
    swap_out(cache, a)
    swap_out(cache, b)
    if evicted:
        taker = make_request("taker", [1])
        cache.allocate(taker, 6 * SIZE)
        cache.free(taker)
    cache.free(a, discard=True)
    cache.check()
    assert cache.lookup(make_request("c", list(range(40)))) == 16, "what it had found is found again"
    assert cache.num_swapped_tokens(b) == 16, "b goes on from there"
    assert cache.swap_in(b) == 16
    cache.check()


def test_readers_of_a_running_request_that_fails_keep_what_is_not_its() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    b = started(cache, "b", list(range(40)))
    swap_out(cache, b)
    cache.free(a, discard=True)
    cache.check()
    assert cache.num_swapped_tokens(b) == 0
    assert cache.swap_in(b) == 0
    assert b.block_table == []
    assert cache.num_free_swap_blocks == 8
    cache.check()


def test_a_reset_has_swapped_requests_computed_again() -> None:
    cache = make_cache()
    a = started(cache, "a", list(range(40)))
    swap_out(cache, a)
    assert cache.reset()
    assert cache.num_swapped_tokens(a) == 0
    assert cache.swap_in(a) == 0
    assert (cache.num_free_blocks, cache.num_free_swap_blocks) == (8, 8)
    cache.check()


# Any order of events


class SwapMachine(RuleBasedStateMachine):
    """Requests that share heads start, decode, go out and in, end and fail, in any order, over tiny pools.

    Invariants (`PagedCache.check`, which is called after each rule): blank + used + cached is the pool; ref counts are those of
    block tables; host blocks are blank, idle or needed by whom the books say; and what a request reads is its own.
    """

    @initialize(
        num_blocks=st.integers(4, 12),
        num_swap_blocks=st.integers(1, 12),
        sharing=st.booleans(),
        pin_hits=st.sampled_from([None, 1]),
    )
    def start(self, num_blocks: int, num_swap_blocks: int, sharing: bool, pin_hits: int | None) -> None:
        self.cache = make_cache(num_blocks, num_swap_blocks, enable_prefix_caching=sharing, pin_hits=pin_hits)
        self.kv = FakeKV(self.cache)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.num_added = 0

    @rule(head=st.integers(0, 3), extra=st.integers(1, 20), other=st.booleans())
    def add(self, head: int, extra: int, other: bool) -> None:
        self.num_added += 1
        first = 1000 if other else 0
        prompt = [*range(first, first + head * SIZE), *([self.num_added] * extra)]
        request = make_request(f"r{self.num_added}", prompt, tenant="t" if other else "")
        found = self.cache.lookup(request)
        if not self.cache.allocate(request, request.num_tokens):
            self.cache.free(request)
            return
        self._compute(request, found)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 20))
    def decode(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        if self.cache.allocate(request, request.num_tokens + count):
            start = request.num_computed_tokens
            request.append_output([self.num_added] * count)
            self._compute(request, start)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), part=st.integers(0, 3))
    def swap_out(self, data: st.DataObject, part: int) -> None:
        request = self._taken(data, self.running)
        num_tokens = max(request.num_computed_tokens - part, 0)
        kept = self.cache.swap_out(request, num_tokens)
        assert request.block_table == []
        assert 0 <= kept <= num_tokens
        assert kept == self.cache.num_swapped_tokens(request)
        assert kept == num_tokens or not kept % SIZE, "a head that is cut is made of whole blocks"
        if kept:
            self.swapped.append(request)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self._taken(data, self.swapped)
        least, before = self.cache.num_swapped_tokens(request), self.cache.num_free_blocks
        restored = self.cache.swap_in(request)
        if restored is None:
            assert (request.block_table, self.cache.num_free_blocks) == ([], before)
            assert self.cache.num_swapped_tokens(request) == least
            assert before < -(-least // SIZE)
            self.swapped.append(request)
            return
        assert least <= restored < request.num_tokens
        self.kv.copy()
        self.kv.assert_holds(request, restored)
        if self.cache.allocate(request, request.num_tokens):
            self._compute(request, restored)
            self.running.append(request)
        else:
            self.cache.free(request)

    @precondition(lambda self: self.running or self.swapped)
    @rule(data=st.data(), discard=st.booleans())
    def end(self, data: st.DataObject, discard: bool) -> None:
        groups = [group for group in (self.running, self.swapped) if group]
        request = self._taken(data, data.draw(st.sampled_from(groups)))
        for _ in range(2):
            self.cache.free(request, discard=discard)
        if discard and request.block_hashes:
            again = make_request(
                "again", list(request.prompt_token_ids) + request.output_token_ids, tenant=request.tenant
            )
            self.cache.lookup(again)
            self.kv.copy()
            self.kv.assert_holds(again, len(again.block_table) * SIZE)
            self.cache.free(again)

    @rule(num_blocks=st.integers(1, 12))
    def evict(self, num_blocks: int) -> None:
        """Somebody else uses up free blocks."""
        count = min(num_blocks, self.cache.num_free_blocks)
        taker = make_request("taker", [999] * (count * SIZE))
        if count and self.cache.allocate(taker, count * SIZE):
            self.kv.copy()
            self.kv.write(taker, 0, count * SIZE)
            self.cache.free(taker)

    @rule()
    def copy(self) -> None:
        """A step without a plan."""
        self.kv.copy()

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert all(self.cache.num_swapped_tokens(request) == 0 for request in self.swapped)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in [*self.running, *self.swapped]:
            self.cache.free(request)
        self.cache.check()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert self.cache.num_free_swap_blocks == self.cache.num_swap_blocks

    def _compute(self, request: Request, start: int) -> None:
        self.kv.copy()
        self.kv.assert_holds(request, start)
        request.num_computed_tokens = request.num_tokens - 1
        self.kv.write(request, start, request.num_computed_tokens)
        self.cache.commit(request)

    def _taken(self, data: st.DataObject, group: list[Request]) -> Request:
        request = data.draw(st.sampled_from(group))
        group.remove(request)
        return request


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
