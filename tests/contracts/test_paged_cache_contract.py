"""The paged cache keeps the cache contract, with each block size, and its own promises."""

from __future__ import annotations

import hashlib
import random

import pytest
from pydantic import ValidationError

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.cache.prefix import block_hash
from core.testing.cache import CacheContract, PrefixSharingContract
from core.testing.fakes import Limits, assert_right_output, make_request
from core.testing.scheduler import SchedulerChecks
from plugins.schedulers.fcfs import Fcfs


class TestPaged16(CacheContract, PrefixSharingContract):
    component = PagedCache


class TestPaged64(CacheContract, PrefixSharingContract):
    component = PagedCache
    settings = {"block_size": 64}


class TestPagedWithoutSharing(CacheContract):
    component = PagedCache
    settings = {"block_size": 32, "enable_prefix_caching": False}

    def test_nothing_is_found(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        assert [self.run(cache, make_request(name, prompt)) for name in "ab"] == [0, 0]


def test_settings_are_refused_with_the_field_named() -> None:
    with pytest.raises(ValidationError, match="block_size"):
        PagedCache.Settings(block_size=24)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="block_sise"):
        PagedCache.Settings(block_sise=16)  # type: ignore[call-arg]


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


class EightBitCache(PagedCache):
    """Hashes that collide all the time."""

    @staticmethod
    def hash_block(parent: bytes, token_ids: list[int], extra: bytes) -> bytes:
        return hashlib.sha256(block_hash(parent, token_ids, extra)).digest()[:1]


class TestCollidingHashes(SchedulerChecks):
    """With 256 hashes nearly every lookup collides, and still no request reads a block of another prompt (bug K1)."""

    component = Fcfs

    def test_outputs_are_right_and_hits_remain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PagedCache, "hash_block", staticmethod(EightBitCache.hash_block))
        rng = random.Random(0)
        engine = self.make_engine(200, Limits(max_num_scheduled_tokens=512, max_num_running_reqs=32), chunk_size=256)
        parts = [[rng.randrange(50) for _ in range(16)] for _ in range(12)]
        for index in range(1500):
            prompt = [token for part in rng.choices(parts, k=rng.randint(1, 3)) for token in part]
            request = make_request(f"r{index}", [*prompt, rng.randrange(50)], 2, seed=index)
            engine.add(request)
            if len(engine.requests) >= 16:
                engine.step()
        engine.drain()
        for request in engine.ended.values():
            assert_right_output(request)
        assert any(request.num_cached_tokens for request in engine.ended.values())

    def test_equal_parent_hash_and_tokens_are_not_enough(self) -> None:
        cache = EightBitCache(EightBitCache.Settings(), CacheContext(8, 1024))
        cache.hash_block = lambda parent, tokens, extra: bytes([len(parent)])  # type: ignore[method-assign]
        tail = list(range(16))
        a = make_request("a", [1] * 16)
        b = make_request("b", [2] * 16 + tail)
        for request in (a, b):  # b's head collides with a's and is not findable, its tail is
            cache.allocate(request, request.num_tokens)
            cache.commit(request, request.num_tokens)
        assert cache.lookup(make_request("c", [1] * 16 + tail + [0])) == 16
        assert cache.lookup(make_request("d", [2] * 16 + tail + [0])) == 0
