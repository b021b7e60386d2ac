"""The KV cache as the engine sees it: what it says is checked, and every block has one writer.

Made at assembly around any `KVCache`. The checks cost where blocks change hands, not per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, ParamSpec, TypeVar

from core.batch import Verdict
from core.cache.kv_cache import KVCache
from core.errors import shown
from core.isolation.faults import Faults, StageError
from core.isolation.stages import Before
from core.request import FinishReason, ReadOnlyList, Request

P = ParamSpec("P")
T = TypeVar("T")


NO_BLOCKS = ReadOnlyList()


@dataclass(slots=True, eq=False)
class Holding:
    """What a request was given. `blocks` is the cache's own list; all others see `table`, which they cannot change."""

    blocks: list[int] = field(default_factory=list)
    table: ReadOnlyList = field(default_factory=lambda: NO_BLOCKS)
    num_found: int = 0  # of these, at the head, found by `lookup`: others may hold them too, so they are only read
    num_planned: int = 0  # positions [0, num_planned) whose KV is written, or will be by the step in hand


class GuardedCache:
    """A `KVCache`. Raises StageError where the cache raises, or answers what cannot be.

    `verdicts`: the newest, so that what a failed request wrote is discarded, be it that its scheduler does not say so (API 1.0).
    """

    def __init__(self, cache: KVCache, faults: Faults):
        self._cache = cache
        self._faults = faults
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        self.holdings: dict[str, Holding] = {}  # by request id; exactly the requests with blocks
        self._num_holders = [0] * self.num_blocks
        self.verdicts: Mapping[str, Verdict] = {}
        self._can_discard = takes_discard(cache)
        self._suspect = False  # it may find what a failed request wrote: it is of API 1.0, and cannot forget that alone

    @property
    def num_free_blocks(self) -> int:
        num_free = self._call(None, lambda: self._cache.num_free_blocks)
        if type(num_free) is not int or not 0 <= num_free <= self.num_blocks:
            self._refuse(f"num_free_blocks is {shown(num_free)}, of {self.num_blocks}")
        return num_free

    def lookup(self, request: Request) -> int:
        """Nothing is found in a cache that is suspect and cannot be emptied yet."""
        if self._suspect:
            self.reset()
        blocks: list[int] = []
        request.block_table = blocks
        found = self._call(request, self._cache.lookup, request)
        size = self.block_size
        if type(found) is not int or found % size or not 0 <= found < max(request.num_tokens, 1):
            self._refuse(f"lookup found {shown(found)} of {request.num_tokens} tokens, in blocks of {size}", request)
        if request.block_table is not blocks or len(blocks) * size != found or not all(map(self._is_block, blocks)):
            self._refuse(f"lookup found {found} tokens and left the blocks {shown(request.block_table)}", request)
        request.block_table = NO_BLOCKS
        if found and self._suspect:
            self._give_back(request, blocks)
            return 0
        if found:
            for block in blocks:
                self._num_holders[block] += 1
            self._hand_out(request, Holding(blocks, num_found=len(blocks), num_planned=found))
        return found

    def allocate(self, request: Request, num_tokens: int) -> bool:
        holding = self.holdings.get(request.request_id) or Holding()
        request.block_table, before = holding.blocks, Before((request,))
        done = self._call(request, self._cache.allocate, request, num_tokens)
        if before.restore():
            self._refuse("allocate changed a request, of which only the blocks are its to change", request)
        if type(done) is not bool:
            self._refuse(f"allocate returned {shown(done)}, not True or False", request)
        if request.block_table is not holding.blocks or holding.blocks[: len(holding.table)] != holding.table:
            self._refuse("allocate changed blocks that the request had already", request)
        self._check_given(request, holding.blocks[len(holding.table) :])
        if done and len(holding.blocks) * self.block_size < num_tokens:
            self._refuse(f"allocate said yes to {num_tokens} tokens and gave {len(holding.blocks)} blocks", request)
        self._hand_out(request, holding)
        return done

    def _check_given(self, request: Request, blocks: Sequence[int]) -> None:
        """Nobody else may hold them."""
        for block in blocks:
            if not self._is_block(block) or self._num_holders[block]:
                self._refuse(f"allocate gave block {shown(block)}, which is held already, or no block", request)
            self._num_holders[block] += 1

    def _hand_out(self, request: Request, holding: Holding) -> None:
        if len(holding.blocks) != len(holding.table):
            holding.table = ReadOnlyList(holding.blocks)
            self.holdings[request.request_id] = holding
        request.block_table = holding.table

    def num_freed_by(self, requests: Sequence[Request]) -> int:
        num_freed = self._call(None, self._cache.num_freed_by, requests)
        if type(num_freed) is not int or not 0 <= num_freed <= self.num_blocks:
            self._refuse(f"num_freed_by returned {shown(num_freed)}")
        return num_freed

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        if request.output_token_ids or not self._faults.cautious:
            self._call(request, self._cache.commit, request, num_tokens)

    def free(self, request: Request, discard: bool = False) -> None:
        holding = self.holdings.pop(request.request_id, None) or Holding()
        for block in holding.blocks:
            self._num_holders[block] -= 1
        failed = discard or self._has_failed(request.request_id)
        if failed and not self._can_discard:
            self._suspect = self._suspect or len(holding.blocks) > holding.num_found
        self._give_back(request, holding.blocks, failed)

    def _give_back(self, request: Request, blocks: list[int], discard: bool = False) -> None:
        request.block_table = blocks
        if discard and self._can_discard:
            self._call(request, self._cache.free, request, discard=True)
        else:
            self._call(request, self._cache.free, request)
        if request.block_table:
            self._refuse(f"free left {len(request.block_table)} blocks in the table", request)
        request.block_table = NO_BLOCKS

    def _has_failed(self, request_id: str) -> bool:
        verdict = self.verdicts.get(request_id)
        return verdict is not None and verdict.finish_reason is FinishReason.ERROR

    def reset(self) -> bool:
        is_empty = bool(self._call(None, self._cache.reset))
        self._suspect = self._suspect and not is_empty
        return is_empty

    def check(self) -> None:
        """Also that nothing is lost: with no request in flight, all blocks are free."""
        self._call(None, self._cache.check)
        if not self.holdings and self.num_free_blocks != self.num_blocks:
            self._refuse(f"{self.num_blocks - self.num_free_blocks} blocks are held by no request")

    def _is_block(self, block: object) -> bool:
        return type(block) is int and 0 <= block < self.num_blocks

    def _call(self, request: Request | None, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        request_id = None if request is None else request.request_id
        return self._faults.call("cache", request_id, method, *args, **kwargs)

    def _refuse(self, reason: str, request: Request | None = None) -> NoReturn:
        raise StageError("cache", reason, None if request is None else request.request_id)


def takes_discard(cache: KVCache) -> bool:
    """Whether its `free` has `discard`, which plugin API 1.0 had not."""
    try:
        parameters = inspect.signature(getattr(cache, "free", None)).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of native code
        return True
    return "discard" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
