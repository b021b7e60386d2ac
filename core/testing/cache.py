"""What every KV cache must do, as tests::

class TestMine(CacheContract, PrefixSharingContract):  # the second where it provides "prefix_sharing"
    component = Mine
"""

from __future__ import annotations

from typing import Any

import pytest

from core.cache.kv_cache import CacheContext, KVCache
from core.request import Request, SamplingParams
from core.testing.contract import Contract
from core.testing.fakes import make_request


class CacheChecks(Contract):
    """What checks of caches are made from; no checks itself."""

    def make_cache(self, num_blocks: int) -> KVCache:
        cache: KVCache = self.make(CacheContext(num_blocks, max_model_len=1024))
        return cache

    def start(self, cache: KVCache, request: Request) -> int:
        """Admit a request and write the KV of all its tokens, as a scheduler does over some steps."""
        found = cache.lookup(request)
        assert cache.allocate(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        cache.commit(request)
        cache.check()
        return found

    def run(self, cache: KVCache, request: Request) -> int:
        """`start`, then free. Returns the tokens found in the cache."""
        found = self.start(cache, request)
        cache.free(request)
        cache.check()
        return found

    def prompt(self, cache: KVCache, num_blocks: int, extra: int = 0, first: int = 0) -> list[int]:
        """Distinct ids for `num_blocks` blocks and `extra` tokens."""
        return list(range(first, first + num_blocks * cache.block_size + extra))


class CacheContract(CacheChecks):
    """Blocks are handed out whole, counted, and given back."""

    def test_allocate_gives_distinct_blocks_for_all_positions(self) -> None:
        cache = self.make_cache(8)
        a, b = make_request("a", [1]), make_request("b", [2])
        assert cache.allocate(a, 3 * cache.block_size)
        assert cache.allocate(b, 2 * cache.block_size + 1)
        assert (len(a.block_table), len(b.block_table)) == (3, 3)
        assert len({*a.block_table, *b.block_table}) == 6
        assert all(0 <= block < cache.num_blocks for block in a.block_table + b.block_table)
        assert cache.num_free_blocks == 2
        cache.check()

    def test_allocate_extends_a_table_and_keeps_what_it_has(self) -> None:
        cache = self.make_cache(4)
        request = make_request("a", [1])
        assert cache.allocate(request, 1)
        first = list(request.block_table)
        assert cache.allocate(request, cache.block_size)
        assert request.block_table == first
        assert cache.allocate(request, cache.block_size + 1)
        assert request.block_table[:1] == first
        assert len(request.block_table) == 2

    def test_allocate_is_all_or_nothing(self) -> None:
        cache = self.make_cache(4)
        request = make_request("a", [1])
        assert cache.allocate(request, 2 * cache.block_size)
        before = list(request.block_table)
        assert not cache.allocate(request, 5 * cache.block_size)
        assert (request.block_table, cache.num_free_blocks) == (before, 2)
        cache.check()

    def test_free_gives_everything_back_and_is_idempotent(self) -> None:
        cache = self.make_cache(4)
        request = make_request("a", [1])
        cache.free(request)
        assert cache.allocate(request, 4 * cache.block_size)
        cache.free(request)
        cache.free(request)
        assert (request.block_table, cache.num_free_blocks) == ([], 4)
        cache.check()

    def test_num_freed_by_counts_blocks_of_their_own(self) -> None:
        cache = self.make_cache(8)
        a, b = make_request("a", [1]), make_request("b", [2])
        cache.allocate(a, 3 * cache.block_size)
        cache.allocate(b, 1)
        assert (cache.num_freed_by([a]), cache.num_freed_by([a, b]), cache.num_freed_by([])) == (3, 4, 0)

    def test_the_whole_pool_can_be_used_again_and_again(self) -> None:
        cache = self.make_cache(4)
        for index in range(20):
            assert self.run(cache, make_request(f"r{index}", self.prompt(cache, 4, first=1000 * index))) == 0
            assert cache.num_free_blocks == cache.num_blocks

    def test_a_block_that_may_still_be_written_is_nobody_elses(self) -> None:
        """Equal prompts at the same time: what is not written yet, and what is written still, is not shared."""
        cache = self.make_cache(32)
        prompt = self.prompt(cache, 2, extra=3)
        requests = [make_request(f"r{index}", prompt) for index in range(3)]
        for request in requests:
            cache.lookup(request)
            assert cache.allocate(request, request.num_tokens)
        written = [block for request in requests for block in request.block_table]
        assert len(set(written)) == len(written), "two requests write to one block"
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            cache.commit(request)
        late = make_request("late", prompt)
        cache.lookup(late)
        assert cache.allocate(late, late.num_tokens)
        tails = [request.block_table[-1] for request in (*requests, late)]
        assert len(set(tails)) == len(tails), "a block that is not full is shared"
        cache.check()

    @pytest.mark.parametrize("field", ["tenant", "cache_salt"])
    def test_nothing_is_found_across_tenants_and_salts(self, field: str) -> None:
        """A hit tells a stranger what another has asked (CVE-2025-46570)."""
        cache = self.make_cache(64)
        prompt = self.prompt(cache, 2, extra=1)
        owners: list[dict[str, Any]] = [{field: "a"}, {field: "b"}, {}, {"tenant": "b", "cache_salt": "b"}]
        for index, owner in enumerate(owners):
            found = self.run(cache, make_request(f"r{index}", prompt, **owner))
            assert found == 0, f"{found} tokens of another {field} are found"

    def test_reset_leaves_blocks_to_whoever_holds_them(self) -> None:
        cache = self.make_cache(4)
        request = make_request("a", [1])
        cache.allocate(request, 1)
        cache.reset()  # a cache may refuse
        assert len(request.block_table) == 1
        assert cache.num_free_blocks == 3
        cache.check()
        cache.free(request)
        assert cache.reset()
        cache.check()


class PrefixSharingContract(CacheChecks):
    """Equal prefixes are found, by those who may, once they are written."""

    def test_a_prefix_is_found_block_by_block(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 3)
        assert self.run(cache, make_request("a", [*prompt, 7])) == 0
        assert self.run(cache, make_request("same", [*prompt, 7])) == 3 * cache.block_size
        other_tail = [*prompt[: 2 * cache.block_size], *[9] * cache.block_size]
        assert self.run(cache, make_request("other tail", other_tail)) == 2 * cache.block_size
        assert self.run(cache, make_request("other head", [9, *prompt[1:], 7])) == 0

    def test_a_fully_cached_prompt_still_computes_a_token(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 2)  # a multiple of the block size, so all of it is cached
        self.run(cache, make_request("a", prompt))
        assert self.run(cache, make_request("b", prompt)) == cache.block_size
        assert self.run(cache, make_request("c", [*prompt, 1])) == 2 * cache.block_size

    def test_holders_share_blocks_and_count_once(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 2, extra=1)
        a, b = make_request("a", prompt), make_request("b", prompt)
        self.start(cache, a)
        self.start(cache, b)
        assert a.block_table[:2] == b.block_table[:2]
        assert cache.num_free_blocks == 16 - 4
        assert (cache.num_freed_by([a]), cache.num_freed_by([b]), cache.num_freed_by([a, b])) == (1, 1, 4)
        cache.free(a)
        assert cache.num_freed_by([b]) == 3
        cache.check()

    def test_only_written_blocks_are_found(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 3, extra=1)
        a = make_request("a", prompt)
        cache.lookup(a)
        cache.allocate(a, a.num_tokens)
        assert cache.lookup(make_request("b", prompt)) == 0
        a.num_computed_tokens = a.num_tokens  # planned, but only two blocks are through
        cache.commit(a, 2 * cache.block_size)
        c = make_request("c", prompt)
        assert cache.lookup(c) == 2 * cache.block_size
        cache.free(c)
        cache.check()

    def test_output_is_shared_for_the_next_turn(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 1)
        request = make_request("turn 1", prompt, output_token_ids=self.prompt(cache, 1, first=500))
        self.run(cache, request)
        assert self.run(cache, make_request("turn 2", [*prompt, *request.output_token_ids, 3])) == 2 * cache.block_size

    @pytest.mark.parametrize("field", ["tenant", "cache_salt"])
    def test_a_prefix_stays_with_its_tenant_and_salt(self, field: str) -> None:
        """The same owner hits, others do not: both sides, or the test would pass without a cache (bug K3)."""

        def run(name: str, owner: dict[str, Any]) -> int:
            return self.run(cache, make_request(name, prompt, **owner))

        cache = self.make_cache(32)
        prompt = self.prompt(cache, 2, extra=1)
        run("a", {field: "a"})
        assert run("b", {field: "b"}) == 0
        assert run("none", {}) == 0
        assert run("a again", {field: "a"}) == 2 * cache.block_size

    def test_prompt_logprobs_computes_the_whole_prompt(self) -> None:
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 2, extra=1)
        self.run(cache, make_request("a", prompt))
        assert self.run(cache, make_request("b", prompt, params=SamplingParams(prompt_logprobs=0))) == 0
        assert self.run(cache, make_request("c", prompt)) == 2 * cache.block_size

    def test_least_recently_used_prefixes_give_way_tails_first(self) -> None:
        cache = self.make_cache(4)
        old, new = self.prompt(cache, 2), self.prompt(cache, 1, first=500)
        self.run(cache, make_request("old", old))
        self.run(cache, make_request("new", new))
        taker = make_request("taker", [1])
        cache.allocate(taker, 2 * cache.block_size)  # one blank block, and the tail of `old`
        assert self.run(cache, make_request("old again", [*old, 1][: cache.block_size + 1])) == cache.block_size
        assert self.run(cache, make_request("new again", [*new, 1])) in (0, cache.block_size)
        cache.free(taker)
        cache.check()

    def test_peek_says_what_lookup_finds_and_takes_nothing(self) -> None:
        """By whomever it is asked, for whatever prompt; and what was only peeked at is not the more recent for it."""
        cache = self.make_cache(6)
        if not hasattr(cache, "peek"):
            pytest.skip("it has no peek (API 1.1)")
        prompt = self.prompt(cache, 2, extra=1)
        self.run(cache, make_request("old", prompt))
        self.run(cache, make_request("new", self.prompt(cache, 2, extra=1, first=500)))
        scored = SamplingParams(prompt_logprobs=0)
        probes = [
            make_request("same", prompt),
            make_request("whole blocks", prompt[:-1]),
            make_request("longer", [*prompt, *prompt]),
            make_request("other", [9, *prompt]),
            make_request("stranger", prompt, tenant="b"),
            make_request("scored", prompt, params=scored),
        ]
        for probe in probes:
            peeked = cache.peek(probe)
            assert (probe.block_table, cache.num_free_blocks) == ([], 6)
            assert cache.lookup(probe) == peeked
            cache.free(probe)
        self.run(cache, make_request("new again", self.prompt(cache, 2, extra=1, first=500)))
        assert cache.peek(probes[0]) == 2 * cache.block_size
        taker = make_request("taker", [1])
        assert cache.allocate(taker, 4 * cache.block_size)
        assert cache.peek(probes[0]) == 0, "peek has made a prefix younger"
        cache.check()

    def test_lookup_undone_leaves_no_trace(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        self.run(cache, make_request("a", prompt))
        request = make_request("b", prompt)
        for _ in range(3):
            assert cache.lookup(request) == 2 * cache.block_size
            assert cache.num_free_blocks == 6
            cache.free(request)
            assert cache.num_free_blocks == 8
        cache.check()

    def test_what_a_failed_request_wrote_is_not_found_again(self) -> None:
        """`free` with `discard` forgets what the request wrote, and keeps what it had found."""
        cache = self.make_cache(16)
        prompt = self.prompt(cache, 3, extra=1)
        good = make_request("good", prompt[: cache.block_size + 1])
        self.run(cache, good)
        failed, reader = make_request("failed", prompt), make_request("reader", prompt)
        assert self.start(cache, failed) == cache.block_size
        assert self.start(cache, reader) == 3 * cache.block_size
        cache.free(failed, discard=True)
        cache.check()
        assert cache.num_free_blocks == 16 - 4, "whoever reads such a block keeps it"
        cache.free(reader)
        cache.free(failed, discard=True)
        assert cache.num_free_blocks == 16
        assert self.run(cache, make_request("again", prompt)) == cache.block_size
        assert self.run(cache, make_request("and again", prompt)) == 3 * cache.block_size

    def test_reset_forgets(self) -> None:
        cache = self.make_cache(8)
        prompt = self.prompt(cache, 2, extra=1)
        self.run(cache, make_request("a", prompt))
        assert cache.reset()
        assert self.run(cache, make_request("b", prompt)) == 0

    def test_nothing_of_before_a_reset_is_found_again(self) -> None:
        """Neither what was cached, nor what a request that went on through it has written or writes."""
        cache = self.make_cache(32)
        prompt = self.prompt(cache, 4, extra=1)
        self.run(cache, make_request("a", prompt[: 2 * cache.block_size + 1]))
        running = make_request("running", prompt[: 3 * cache.block_size + 1])
        self.start(cache, running)
        if not cache.reset():
            assert cache.lookup(make_request("b", prompt)) == 3 * cache.block_size, "a refused reset changes nothing"
            return
        table = list(running.block_table)
        running.append_output(prompt[3 * cache.block_size + 1 :])
        assert cache.allocate(running, running.num_tokens)
        assert running.block_table[: len(table)] == table
        running.num_computed_tokens = running.num_tokens
        cache.commit(running)
        assert self.run(cache, make_request("b", prompt[: cache.block_size + 1])) == 0
        cache.free(running)
        cache.check()
        assert self.run(cache, make_request("c", prompt)) == cache.block_size, "what `b` wrote since, and no more"
        assert cache.num_free_blocks == cache.num_blocks
