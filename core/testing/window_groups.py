"""What a KV cache that provides `window_groups` must do beside the rest, as tests::

class TestMine(CacheContract, WindowGroupsContract):
    component = Mine
"""

from __future__ import annotations

import pytest

from core.cache.kv_cache import CacheContext, KVCache
from core.request import Request
from core.testing.cache import CacheChecks
from core.testing.fakes import make_request

CHUNK = 64  # most tokens of a request in a step
WINDOWS = (None, 100, 100, 20)
LOCAL_WINDOWS = (100, 100, 20)


class WindowGroupsContract(CacheChecks):
    """Groups of sliding layers hold a window and a step, whatever the length of the request."""

    def make_groups(self, num_blocks: int) -> KVCache:
        cache: KVCache = self.make(CacheContext(num_blocks, 4096, 0, WINDOWS, CHUNK))
        return cache

    def compute(self, cache: KVCache, request: Request, until: int, chunk: int = CHUNK) -> None:
        """As an engine does, from `num_computed_tokens` on; positions are allocated already."""
        while request.num_computed_tokens < until:
            start = request.num_computed_tokens
            end = min(start + chunk, until)
            cache.slide(request, start, end)
            self.assert_windows(cache, request, start, end)
            request.num_computed_tokens = end
            cache.commit(request)
            cache.check()

    def begin(self, cache: KVCache, request: Request) -> int:
        """Admit a request and compute all its tokens. Returns those that were found."""
        found = cache.lookup(request)
        assert cache.allocate(request, request.num_tokens)
        request.num_computed_tokens = found
        self.compute(cache, request, request.num_tokens)
        return found

    def begin_and_end(self, cache: KVCache, request: Request) -> int:
        found = self.begin(cache, request)
        cache.free(request)
        cache.check()
        return found

    def assert_windows(self, cache: KVCache, request: Request, start: int, end: int) -> None:
        """Each group has blocks from the window of `start` to `end`, and no more of them than that takes."""
        size = cache.block_size
        blocks = [*request.block_table, *(block for table in request.group_tables for block in table.blocks)]
        assert len(request.group_tables) == len(LOCAL_WINDOWS), "one table for each group after the first"
        assert len(set(blocks)) == len(blocks), "a block is in two places"
        for window, table in zip(LOCAL_WINDOWS, request.group_tables, strict=True):
            first = max(start - window + 1, 0) // size
            assert table.first == first, "blocks that have left the window are held, or others are given back"
            assert (table.first + len(table.blocks)) * size >= end, "a position of the step has no block"
            assert len(table.blocks) <= (window + CHUNK) // size + 2, "more than a window and a step"

    def num_held(self, cache: KVCache) -> int:
        return cache.num_blocks - cache.num_free_blocks

    def test_a_long_prompt_in_chunks_holds_a_window_and_a_step(self) -> None:
        cache = self.make_groups(800)
        request = make_request("a", self.prompt(cache, 2000 // cache.block_size))
        assert self.begin(cache, request) == 0
        full = len(request.block_table)
        local = sum((window + CHUNK) // cache.block_size + 2 for window in LOCAL_WINDOWS)
        assert self.num_held(cache) <= full + local < 4 * full
        cache.free(request)
        assert (request.group_tables, cache.num_free_blocks) == ((), cache.num_blocks)
        cache.check()

    def test_decoding_holds_windows(self) -> None:
        cache = self.make_groups(800)
        request = make_request("a", self.prompt(cache, 1), max_tokens=4000)
        self.begin(cache, request)
        for _ in range(600):
            request.append_output([7])
            assert cache.allocate(request, request.num_tokens)
            self.compute(cache, request, request.num_tokens)
        local = sum(window // cache.block_size + 2 for window in LOCAL_WINDOWS)
        assert sum(len(table.blocks) for table in request.group_tables) <= local

    def test_what_is_said_to_be_missing_is_what_lacks(self) -> None:
        """`num_missing` is 0 or less exactly where `allocate` says yes; what it promises is there in each step."""
        for num_blocks in range(1, 120):
            cache = self.make_groups(num_blocks)
            request = make_request("a", self.prompt(cache, 30))
            missing = cache.num_missing(request, request.num_tokens)
            fits = cache.num_needed(request.num_tokens) <= num_blocks
            assert (missing <= 0) == fits
            assert cache.allocate(request, request.num_tokens) == fits
            if fits:
                self.compute(cache, request, request.num_tokens)
            cache.check()

    def test_promises_to_some_are_not_free_for_others(self) -> None:
        cache = self.make_groups(100)
        running: list[Request] = []
        for index in range(100):
            request = make_request(f"r{index}", self.prompt(cache, 6, first=1000 * index))
            if not cache.allocate(request, request.num_tokens):
                break
            running.append(request)
        assert running
        for start in range(0, running[0].num_tokens, CHUNK):
            for request in running:
                self.compute(cache, request, min(start + CHUNK, request.num_tokens))
        assert cache.num_freed_by(running) == self.num_held(cache)

    def test_a_step_after_rejected_drafts_finds_its_window(self) -> None:
        cache = self.make_groups(800)
        request = make_request("a", self.prompt(cache, 20, extra=3))
        self.begin(cache, request)
        for _ in range(40):
            start = request.num_computed_tokens
            request.append_output([1])
            assert cache.allocate(request, start + 9)  # a token and eight drafts, of which seven are rejected
            cache.slide(request, start, start + 9)
            request.append_output([2])
            request.num_computed_tokens = start + 2
            cache.commit(request, start + 2)
            cache.check()
            for window, table in zip(LOCAL_WINDOWS, request.group_tables, strict=True):
                assert table.first * cache.block_size <= max(start + 2 - window + 1, 0)

    @pytest.mark.parametrize("chunk", [16, 50, CHUNK])
    def test_a_prefix_is_found_with_its_last_window(self, chunk: int) -> None:
        self.needs("prefix_sharing")
        cache = self.make_groups(2000)
        size = cache.block_size
        prompt = self.prompt(cache, 20, extra=1)
        assert self.begin_and_end(cache, make_request("a", prompt)) == 0
        again = make_request("b", prompt)
        assert cache.lookup(again) == 20 * size
        for window, table in zip(LOCAL_WINDOWS, again.group_tables, strict=True):
            assert table.first == max(20 * size - window + 1, 0) // size and table.first + len(table.blocks) == 20
        assert cache.allocate(again, again.num_tokens)
        again.num_computed_tokens = 20 * size
        self.compute(cache, again, again.num_tokens, chunk)
        cache.free(again)
        assert cache.num_free_blocks == cache.num_blocks
        longer = make_request("c", [*prompt[: 12 * size], *[9] * size])
        assert self.begin_and_end(cache, longer) == 12 * size, "blocks that have left the window are found, too"

    def test_holders_of_a_window_slide_each_by_itself(self) -> None:
        """Also in a pool that is full: whoever lets go of a block that another holds finds one in its place."""
        self.needs("prefix_sharing")
        cache = self.make_groups(400)
        prompt = self.prompt(cache, 10)
        self.begin_and_end(cache, make_request("seed", [*prompt, 1]))
        running: list[Request] = []
        while True:
            tail = self.prompt(cache, 8, first=1000 * (len(running) + 1))
            request = make_request(f"r{len(running)}", [*prompt, *tail])
            request.num_computed_tokens = cache.lookup(request)
            if not cache.allocate(request, request.num_tokens):
                cache.free(request)
                break
            running.append(request)
        assert len(running) > 2 and running[0].num_computed_tokens == 10 * cache.block_size
        while any(request.num_computed_tokens < request.num_tokens for request in running):
            for request in running:
                self.compute(cache, request, min(request.num_computed_tokens + 24, request.num_tokens))

    def test_a_prefix_is_as_long_as_all_groups_have_it(self) -> None:
        """In a pool under pressure, whatever is found can be read: the last window of it is there in all groups."""
        self.needs("prefix_sharing")
        cache = self.make_groups(150)
        prompts = [self.prompt(cache, 9, extra=1, first=1000 * index) for index in range(5)]
        lengths = set()
        for index in range(60):
            request = make_request(f"r{index}", prompts[index * index % 5])
            lengths.add(self.begin_and_end(cache, request))
        assert len(lengths) > 1

    def test_what_a_failed_request_wrote_is_not_found_again_in_any_group(self) -> None:
        """Also what has left its windows since."""
        self.needs("prefix_sharing")
        cache = self.make_groups(2000)
        prompt = self.prompt(cache, 30, extra=1)
        good = make_request("good", prompt[: 4 * cache.block_size + 1])
        self.begin_and_end(cache, good)
        writers: dict[int, str] = {}
        failed, again, last = (make_request(name, prompt) for name in ("failed", "again", "last"))
        for request in (failed, again):
            request.num_computed_tokens = cache.lookup(request)
            assert request.num_computed_tokens == 4 * cache.block_size
            assert cache.allocate(request, request.num_tokens)
            for start in range(4 * cache.block_size, request.num_tokens, cache.block_size):
                self.compute(cache, request, min(start + cache.block_size, request.num_tokens))
                index = start // cache.block_size
                written = [request.block_table[index], *(t.blocks[index - t.first] for t in request.group_tables)]
                writers |= dict.fromkeys(written, request.request_id)
            cache.free(request, discard=request is failed)
            cache.check()
            assert cache.num_free_blocks == cache.num_blocks
        assert cache.lookup(last) == 30 * cache.block_size
        found = [*last.block_table, *(block for table in last.group_tables for block in table.blocks)]
        assert "failed" not in {writers.get(block) for block in found}
