"""KV caches that each break one promise of `core.cache.kv_cache`."""

from __future__ import annotations

from core.cache.kv_cache import CacheSettings
from core.cache.paged import PagedCache


class FreesTwice:
    """A stack of free blocks, onto which a request's blocks go each time it is freed."""

    caught_by = "test_free_gives_everything_back_and_is_idempotent"

    class Settings(CacheSettings):
        pass

    def __init__(self, settings, context):
        self.block_size = settings.block_size
        self.num_blocks = context.num_blocks
        self._free = list(range(context.num_blocks))
        self._tables = {}

    @property
    def num_free_blocks(self):
        return len(self._free)

    def lookup(self, request):
        return 0

    def allocate(self, request, num_tokens):
        missing = -(-num_tokens // self.block_size) - len(request.block_table)
        if missing > len(self._free):
            return False
        request.block_table += [self._free.pop() for _ in range(missing)]
        self._tables[request.request_id] = list(request.block_table)
        return True

    def num_freed_by(self, requests):
        return sum(len(request.block_table) for request in requests)

    def commit(self, request, num_tokens=None):
        pass

    def free(self, request):
        self._free += self._tables.get(request.request_id, [])
        request.block_table.clear()

    def reset(self):
        return len(self._free) == self.num_blocks

    def check(self):
        assert len(self._free) <= self.num_blocks


class SharesUnwritten(PagedCache):
    """A block can be found as soon as it is handed out, before anything is in it."""

    caught_by = "test_a_block_that_may_still_be_written_is_nobody_elses"

    def allocate(self, request, num_tokens):
        done = super().allocate(request, num_tokens)
        self.commit(request, request.num_tokens if done else 0)
        return done


class WithoutSalt(PagedCache):
    """Equal tokens are equal blocks, whoever they are for."""

    caught_by = "test_nothing_is_found_across_tenants_and_salts"

    def _extra(self, request, index):
        return b""
