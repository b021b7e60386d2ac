"""The paged cache keeps the cache contract, with each block size, and its own promises."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from core.cache.kv_cache import CacheContext, KVCache
from core.cache.paged import PagedCache
from core.testing.cache import CacheContract, PrefixSharingContract
from core.testing.fakes import make_request
from core.testing.swap import SwapContract


class TestPaged16(CacheContract, PrefixSharingContract, SwapContract):
    component = PagedCache


class TestPaged64(CacheContract, PrefixSharingContract, SwapContract):
    component = PagedCache
    settings = {"block_size": 64}


class TestPagedWithoutSharing(CacheContract, SwapContract):
    component = PagedCache
    settings = {"block_size": 32, "enable_prefix_caching": False}

    def test_nothing_is_found(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        assert [self.run(cache, make_request(name, prompt)) for name in "ab"] == [0, 0]


class TestPagedWithPins(CacheContract):
    """The rest of `PrefixSharingContract` holds too; strict LRU is what pins are an exception to."""

    component = PagedCache
    settings = {"pin_hits": 2, "max_pinned_fraction": 0.5}

    def fill(self, cache: KVCache) -> None:
        """Other prompts, one after the other, that would push all content out."""
        for index in range(cache.num_blocks):
            self.run(cache, make_request(f"other{index}", self.prompt(cache, 1, 1, first=1000 * (index + 1))))

    def test_a_prefix_that_is_used_often_survives_those_that_are_not(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        for index in range(3):
            self.run(cache, make_request(f"r{index}", prompt))
        self.run(cache, make_request("rare", self.prompt(cache, 2, extra=1, first=500)))
        self.fill(cache)
        assert cache.peek(make_request("rare again", self.prompt(cache, 2, extra=1, first=500))) == 0
        assert cache.peek(make_request("again", prompt)) == 2 * cache.block_size
        holder = make_request("holder", [1])
        assert cache.allocate(holder, 8 * cache.block_size), "it is evicted where blocks would lack"
        cache.check()

    def test_lookups_that_are_given_back_and_own_content_are_no_hits(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        self.run(cache, make_request("first", prompt))
        for index in range(5):
            probe = make_request(f"probe{index}", prompt)
            assert cache.lookup(probe)
            cache.free(probe)
        self.run(cache, make_request("resumed", prompt, num_preemptions=1))
        self.fill(cache)
        assert cache.peek(make_request("again", prompt)) == 0


def test_settings_are_refused_with_the_field_named() -> None:
    with pytest.raises(ValidationError, match="block_size"):
        PagedCache.Settings(block_size=24)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="block_sise"):
        PagedCache.Settings(block_sise=16)  # type: ignore[call-arg]


def test_settings_that_would_do_nothing_are_refused_with_what_they_need() -> None:
    with pytest.raises(ValidationError, match="cache.max_pinned_fraction .* set cache.pin_hits"):
        PagedCache.Settings(max_pinned_fraction=0.5)
    for values in ({}, {"swap_memory": 0}, {"swap_memory": "4GiB", "num_swap_blocks": 0}):
        with pytest.raises(
            ValidationError, match="cache.swap_checksums .* set cache.swap_memory .* cache.num_swap_blocks"
        ):
            PagedCache.Settings(swap_checksums=True, **values)  # type: ignore[arg-type]
        assert not PagedCache.Settings(swap_checksums=False, **values).swaps  # type: ignore[arg-type]
    assert PagedCache.Settings(swap_checksums=True, num_swap_blocks=3).swaps


def test_lookup_of_a_request_with_blocks_is_an_error() -> None:
    cache = PagedCache(PagedCache.Settings(), CacheContext(4, 1024))
    request = make_request("a", [1])
    cache.allocate(request, 1)
    with pytest.raises(ValueError, match="holds blocks already"):
        cache.lookup(request)


def test_content_is_found_again_after_its_head_was_evicted_and_recomputed() -> None:
    """Two requests write equal blocks; the findable head goes first, its descendants stay; a new head reconnects them."""
    cache = PagedCache(PagedCache.Settings(), CacheContext(7, 1024))
    prompt = list(range(16))
    first, second = make_request("first", prompt), make_request("second", [*prompt, *range(100, 117)])
    for request in (first, second):
        cache.allocate(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
    cache.commit(first)
    cache.commit(second)  # its own head is a duplicate and not findable
    cache.free(first)
    taker = make_request("taker", [1])
    assert cache.allocate(taker, 4 * 16)  # three blank blocks, then the findable head
    assert cache.lookup(make_request("miss", [*prompt, 1])) == 0
    cache.free(taker)
    again = make_request("again", prompt)
    cache.allocate(again, 16)
    cache.commit(again, 16)
    third = make_request("third", list(second.prompt_token_ids))
    assert cache.lookup(third) == 32
    assert third.block_table == [again.block_table[0], second.block_table[1]]
    cache.check()


def test_equal_parent_hash_and_tokens_are_not_enough() -> None:
    cache = PagedCache(PagedCache.Settings(), CacheContext(8, 1024))
    cache.hash_block = lambda parent, tokens, extra: bytes([len(parent)])  # type: ignore[method-assign]
    tail = list(range(16))
    a = make_request("a", [1] * 16)
    b = make_request("b", [2] * 16 + tail)
    for request in (a, b):  # b's head collides with a's and is not findable, its tail is
        cache.allocate(request, request.num_tokens)
        cache.commit(request, request.num_tokens)
    assert cache.lookup(make_request("c", [1] * 16 + tail + [0])) == 16
    assert cache.lookup(make_request("d", [2] * 16 + tail + [0])) == 0
