"""What becomes of a preempted request's KV: given up and computed again, or moved to host memory and back."""

from __future__ import annotations

from typing import Literal

from core.cache.kv_cache import KVCache
from core.request import Request, RequestStatus
from core.scheduling.swap_cost import SwapCost


class PreemptedKV:
    """Decides victim by victim; what the host pool cannot hold is computed again."""

    def __init__(self, cache: KVCache, mode: Literal["auto", "swap", "recompute"], cost: SwapCost | None):
        self._cache = cache
        self._swaps = mode != "recompute" and getattr(cache, "num_swap_blocks", 0) > 0
        self._cost = cost if mode == "auto" else None

    def give_up(self, request: Request) -> RequestStatus:
        """Its blocks are free afterwards. What the request waits as: SWAPPED where some of its KV is kept.

        KV of a step in flight is written by the time a copy is made: device work runs in the order of planning.
        """
        if self._is_worth(request) and self._cache.swap_out(request, request.num_computed_tokens):
            return RequestStatus.SWAPPED
        self._cache.free(request)
        return RequestStatus.PREEMPTED

    def num_to_compute(self, request: Request) -> int:
        """Of a SWAPPED request: known tokens whose KV is not kept."""
        return request.num_known_tokens - min(self._cache.num_swapped_tokens(request), request.num_tokens - 1)

    def take_back(self, request: Request) -> int | None:
        """Of a SWAPPED request: tokens whose KV it has again; None, with nothing changed, while blocks lack."""
        return self._cache.swap_in(request)

    def _is_worth(self, request: Request) -> bool:
        if not self._swaps:
            return False
        if self._cost is None:
            return True
        # What others hold too is not copied, and neither is it computed again: it is found where it is.
        num_shared = max(len(request.block_table) - self._cache.num_freed_by([request]), 0)
        num_tokens = max(request.num_computed_tokens - num_shared * self._cache.block_size, 0)
        return self._cost.is_worth(-(-num_tokens // self._cache.block_size), num_tokens)
