"""Counting in blocks: what a request needs, what lacks, and whose blocks would make up for it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from core.cache.kv_cache import KVCache
from core.cache.window_groups import longest_request
from core.request import Request


class BlockBudget:
    """Arithmetic over a KV cache's books. Changes nothing."""

    def __init__(self, cache: KVCache):
        self._cache = cache
        self._asks = hasattr(cache, "num_missing") and hasattr(cache, "num_needed")  # API 1.2

    def num_needed(self, num_positions: int) -> int:
        """Blocks that `num_positions` take."""
        if self._asks:
            return self._cache.num_needed(num_positions)
        return -(-num_positions // self._cache.block_size)

    @cached_property
    def max_positions(self) -> int:
        """Of the longest request that an empty pool holds."""
        return longest_request(self._cache.num_blocks, self._cache.block_size, self.num_needed)

    def num_missing(self, request: Request, num_positions: int) -> int:
        """Blocks that lack for a request to hold `num_positions`; 0 or less when they are free."""
        if self._asks:
            return self._cache.num_missing(request, num_positions)
        return self.num_needed(num_positions) - len(request.block_table) - self._cache.num_free_blocks

    def choose(self, victims: Iterable[Request], num_blocks: int, num_slots: int, num_each: int = 0) -> list[Request]:
        """The first victims that together free so many blocks and slots; none at all when all of them do not.

        A victim whose blocks others hold too frees nothing and is passed over. `num_each`: blocks that are needed less for each
        victim. Linear in what victims hold: each is asked about alone, and together only where they share too much for that.
        """
        chosen: list[Request] = []
        passed: list[Request] = []
        freed = 0
        for victim in victims:
            if freed >= num_blocks and len(chosen) >= num_slots:
                break
            own = self._cache.num_freed_by([victim])
            (chosen if own or len(chosen) < num_slots else passed).append(victim)
            freed += (own + num_each) if chosen and chosen[-1] is victim else 0
        if freed >= num_blocks and len(chosen) >= num_slots:
            return chosen
        together = [*chosen, *passed]
        enough = self._cache.num_freed_by(together) + num_each * len(together) >= num_blocks
        return together if enough and len(together) >= num_slots and passed else []
