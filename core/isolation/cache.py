"""The KV cache as the engine sees it: what it says is checked, and every block has one writer.

Made at assembly around any `KVCache`. The checks cost where blocks change hands, not per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, ParamSpec, TypeVar

from core.batch import ScheduledRequest, Verdict
from core.cache.kv_cache import KVCache, KVCopy
from core.errors import shown
from core.isolation.faults import Faults, StageError
from core.isolation.stages import Before
from core.isolation.swap import CopyChecks, can_swap
from core.isolation.window_groups import GroupChecks
from core.request import FinishReason, GroupTable, ReadOnlyList, Request

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
    groups: tuple[GroupTable, ...] = ()  # tables of the groups after the first
    num_slots: int = 0  # positions [0, num_slots) that they reach


class GuardedCache:
    """A `KVCache`. Raises StageError where the cache raises, or answers what cannot be.

    `verdicts`: the newest, so that what a failed request wrote is discarded, be it that its scheduler does not say so (API 1.0).
    """

    def __init__(
        self, cache: KVCache, faults: Faults, num_swap_blocks: int = 0, windows: Sequence[int | None] = (None,)
    ):
        self._cache = cache
        self._faults = faults
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        self.holdings: dict[str, Holding] = {}  # by request id; exactly the requests with blocks
        self._num_holders = [0] * self.num_blocks
        self.verdicts: Mapping[str, Verdict] = {}
        self._can_discard = takes_discard(cache)
        self._can_peek = callable(getattr(cache, "peek", None))
        self._can_count = callable(getattr(cache, "num_needed", None)) and callable(getattr(cache, "num_missing", None))
        others = [window for window in windows[1:] if window is not None]
        self._groups = GroupChecks(others, self.block_size, self._num_holders) if others else None
        self.num_swap_blocks = num_swap_blocks if can_swap(cache) else 0  # 0: whoever is swapped out is computed again
        self.swapped: dict[str, int] = {}  # by request id: tokens kept in host memory
        self._copies = CopyChecks(self.num_blocks, self.num_swap_blocks)
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
            holding = Holding(blocks, num_found=len(blocks), num_planned=found)
            if self._groups is not None:
                self._set_groups(request, holding, partial(self._groups.found, found))
            self._hand_out(request, holding)
        return found

    def peek(self, request: Request) -> int:
        """By `lookup` where the cache has no `peek` (API 1.1)."""
        if self._suspect:
            return 0
        if not self._can_peek:
            found = self.lookup(request)
            self.free(request)
            return found
        table = request.block_table
        found = self._call(request, self._cache.peek, request)
        if type(found) is not int or found % self.block_size or not 0 <= found < max(request.num_tokens, 1):
            self._refuse(f"peek found {shown(found)} of {request.num_tokens} tokens", request)
        if request.block_table is not table:
            self._refuse("peek changed the blocks of a request", request)
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
        if request.group_tables is not holding.groups:
            self._refuse("allocate changed the group tables, which only lookup, slide and free may", request)
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

    def slide_all(self, parts: Sequence[ScheduledRequest]) -> None:
        """`slide` for each part of a plan, which is checked already; a look per part where no table has to move."""
        if self._groups is None:
            return
        for part in parts:
            request, end = part.request, part.start + part.num_tokens
            holding = self.holdings[request.request_id]
            if request.group_tables is not holding.groups:
                raise StageError("scheduler", "it put other group tables in place of the cache's", request.request_id)
            if end > holding.num_slots:
                self.slide(request, part.start, end)

    def slide(self, request: Request, start: int, end: int) -> None:
        if self._groups is None:
            return
        holding, before = self.holdings[request.request_id], Before((request,))
        self._call(request, self._cache.slide, request, start, end)
        self._check_changed("slide", before, request)
        self._set_groups(request, holding, partial(self._groups.slid, holding.groups, start, end))

    def _set_groups(
        self, request: Request, holding: Holding, check: Callable[[object], tuple[GroupTable, ...]]
    ) -> None:
        """What the cache has made of the request's group tables, once `check` has seen it."""
        assert self._groups is not None
        try:
            holding.groups = check(request.group_tables)
        except ValueError as error:
            self._refuse(str(error), request)
        holding.num_slots = self._groups.num_slots(holding.groups)

    def num_needed(self, num_tokens: int) -> int:
        """One block for every block_size tokens, where the cache does not say (API 1.1)."""
        if not self._can_count:
            return -(-num_tokens // self.block_size)
        needed = self._call(None, self._cache.num_needed, num_tokens)
        if type(needed) is not int or needed < -(-num_tokens // self.block_size):
            self._refuse(f"num_needed returned {shown(needed)} for {num_tokens} tokens")
        return needed

    def num_missing(self, request: Request, num_tokens: int) -> int:
        if not self._can_count:
            return self.num_needed(num_tokens) - len(request.block_table) - self.num_free_blocks
        missing = self._call(request, self._cache.num_missing, request, num_tokens)
        if type(missing) is not int:
            self._refuse(f"num_missing returned {shown(missing)}", request)
        return missing

    def num_freed_by(self, requests: Sequence[Request]) -> int:
        num_freed = self._call(None, self._cache.num_freed_by, requests)
        if type(num_freed) is not int or not 0 <= num_freed <= self.num_blocks:
            self._refuse(f"num_freed_by returned {shown(num_freed)}")
        return num_freed

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        if request.output_token_ids or not self._faults.cautious:
            self._call(request, self._cache.commit, request, num_tokens)

    def free(self, request: Request, discard: bool = False) -> None:
        holding = self._taken(request)
        self.swapped.pop(request.request_id, None)
        failed = discard or self._has_failed(request.request_id)
        if failed and not self._can_discard:
            self._suspect = self._suspect or len(holding.blocks) > holding.num_found
        self._give_back(request, holding.blocks, failed)

    def _taken(self, request: Request) -> Holding:
        """What the request holds, and holds no longer."""
        holding = self.holdings.pop(request.request_id, None) or Holding()
        for block in holding.blocks:
            self._num_holders[block] -= 1
        if self._groups is not None:
            self._groups.drop(holding.groups)
        return holding

    def _give_back(self, request: Request, blocks: list[int], discard: bool = False) -> None:
        request.block_table = blocks
        if discard and self._can_discard:
            self._call(request, self._cache.free, request, discard=True)
        else:
            self._call(request, self._cache.free, request)
        if request.block_table:
            self._refuse(f"free left {len(request.block_table)} blocks in the table", request)
        request.block_table, request.group_tables = NO_BLOCKS, ()

    @property
    def num_free_swap_blocks(self) -> int:
        if not self.num_swap_blocks:
            return 0
        num_free = self._call(None, lambda: self._cache.num_free_swap_blocks)
        if type(num_free) is not int or not 0 <= num_free <= self.num_swap_blocks:
            self._refuse(f"num_free_swap_blocks is {shown(num_free)}, of {self.num_swap_blocks}")
        return num_free

    def swap_out(self, request: Request, num_tokens: int) -> int:
        """What was never planned to be written is not kept. `free` where nothing can be kept."""
        holding = self.holdings.get(request.request_id)
        if not self.num_swap_blocks or holding is None:
            self.free(request)
            return 0
        if type(num_tokens) is not int or not 0 <= num_tokens <= holding.num_planned:
            reason = f"it asked to keep {shown(num_tokens)} tokens; KV is written up to {holding.num_planned}"
            raise StageError("scheduler", reason, request.request_id)
        request.block_table, before = self._taken(request).blocks, Before((request,))
        kept = self._call(request, self._cache.swap_out, request, num_tokens)
        self._check_changed("swap_out", before, request)
        if type(kept) is not int or not 0 <= kept <= num_tokens or request.block_table:
            left = shown(request.block_table)
            self._refuse(f"swap_out kept {shown(kept)} of {num_tokens} tokens and left the blocks {left}", request)
        request.block_table = NO_BLOCKS
        if kept:
            self.swapped[request.request_id] = kept
        return kept

    def num_swapped_tokens(self, request: Request) -> int:
        most = self.swapped.get(request.request_id, 0)
        if not most:
            return 0
        kept = self._call(request, self._cache.num_swapped_tokens, request)
        if type(kept) is not int or not 0 <= kept <= min(most, request.num_tokens - 1):
            self._refuse(f"num_swapped_tokens is {shown(kept)}; {most} were kept of {request.num_tokens}", request)
        return kept

    def swap_in(self, request: Request) -> int | None:
        """`lookup` for a request of which nothing is kept."""
        if request.request_id not in self.swapped:
            return self.lookup(request)
        blocks: list[int] = []
        request.block_table, before = blocks, Before((request,))
        restored = self._call(request, self._cache.swap_in, request)
        self._check_changed("swap_in", before, request)
        if request.block_table is not blocks or not all(map(self._is_block, blocks)):
            self._refuse(f"swap_in left the blocks {shown(request.block_table)}", request)
        request.block_table = NO_BLOCKS
        if restored is None and not blocks:
            return None
        self._check_restored(request, restored, blocks)
        del self.swapped[request.request_id]
        if blocks:
            self._copies.gave(block for block in blocks if not self._num_holders[block])
            for block in blocks:
                self._num_holders[block] += 1
            num_full = restored // self.block_size if restored else 0
            self._hand_out(request, Holding(blocks, num_found=num_full, num_planned=restored or 0))
        return restored

    def _check_restored(self, request: Request, restored: object, blocks: Sequence[int]) -> None:
        """What is written next is nobody else's."""
        if type(restored) is not int or not 0 <= restored < max(request.num_tokens, 1):
            self._refuse(f"swap_in restored {shown(restored)} of {request.num_tokens} tokens", request)
        size = self.block_size
        if len(blocks) != -(-restored // size) or len(set(blocks)) != len(blocks):
            self._refuse(f"swap_in restored {restored} tokens in the blocks {shown(blocks)}", request)
        if restored % size and self._num_holders[blocks[-1]]:
            self._refuse(f"swap_in gave block {blocks[-1]} to write to, which is held already", request)

    def _check_changed(self, method: str, before: Before, request: Request) -> None:
        if before.restore():
            self._refuse(f"{method} changed a request, of which only the blocks are its to change", request)

    def take_copies(self) -> tuple[KVCopy, ...]:
        if not self.num_swap_blocks:
            return ()
        copies = self._call(None, self._cache.take_copies)
        try:
            return self._copies.check(copies) if copies != () else ()
        except ValueError as error:
            self._refuse(str(error))

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
        if not self.swapped and self.num_free_swap_blocks != self.num_swap_blocks:
            self._refuse(f"{self.num_swap_blocks - self.num_free_swap_blocks} host blocks are needed by no request")

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
