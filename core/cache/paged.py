"""Paged KV bookkeeping with prefix sharing: the `paged` choice of config group `cache`. No tensors, no torch.

Ideas: PagedAttention (Kwon et al., SOSP'23) for blocks and tables; vLLM V1 for hash-chained sharing of full blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Self

from pydantic import Field, model_validator

from core.cache.block_pool import BlockPool
from core.cache.kv_cache import CacheContext, CacheSettings, KVCopy
from core.cache.prefix import ROOT_HASH, PrefixNode, block_hash, chain_of, first_block_keys
from core.cache.swap import Swapped, SwapSpace
from core.cache.window_groups import WindowGroups
from core.request import Request


@dataclass(slots=True)
class _Holding:
    """A request that holds blocks, and how far its content is known to the index."""

    request: Request
    num_found: int = 0  # blocks at the head that were written by others
    num_committed: int = 0  # full blocks whose KV is written and hashed
    node: PrefixNode | None = None  # content of the last of them
    is_shared: bool = True  # False: the cache was reset since, and what it writes is not to be found


class PagedCache:
    """Fixed-size blocks, ref counted; full blocks are shared by content between requests of one tenant and salt.

    A block table only grows until `free`: a duplicate of a cached block is kept, not replaced, so that tables already
    handed to the device stay true.
    """

    class Settings(CacheSettings):
        enable_prefix_caching: bool = Field(default=True, description="share full blocks of equal prefixes")
        pin_hits: int | None = Field(
            default=None, ge=1, description="hits after which a prefix is evicted after all others; null: plain LRU"
        )
        max_pinned_fraction: float = Field(default=0.25, gt=0, le=1, description="of all blocks, kept so at most")

        @model_validator(mode="after")
        def _pin_keys_go_together(self) -> Self:
            if self.pin_hits is None and "max_pinned_fraction" in self.model_fields_set:
                raise ValueError(
                    "cache.max_pinned_fraction bounds what cache.pin_hits keeps, and that is not set; set cache.pin_hits (2), "
                    "or leave out cache.max_pinned_fraction"
                )
            return self

    hash_block = staticmethod(block_hash)

    def __init__(self, settings: Settings, context: CacheContext):
        self._block_size = settings.block_size
        self._sharing = settings.enable_prefix_caching
        self._pool = BlockPool(
            context.num_blocks,
            settings.pin_hits or 0,
            int(context.num_blocks * settings.max_pinned_fraction) if settings.pin_hits else 0,
        )
        self._swap = SwapSpace(context.num_swap_blocks, self._pool, settings.block_size)
        self._windows = self._window_groups(context)  # None: one group of layers, whose tables are all there is
        self._holdings: dict[str, _Holding] = {}  # by request id; exactly the requests with blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free if self._windows is None else self._pool.num_free - self._windows.num_set_aside

    def lookup(self, request: Request) -> int:
        if request.block_table:
            raise ValueError(f"lookup of {request.request_id}, which holds blocks already")
        holding = _Holding(request)
        self._take_prefix(request, holding)
        holding.num_found = holding.num_committed
        return holding.num_committed * self._block_size

    def peek(self, request: Request) -> int:
        return sum(1 for _ in self._prefix(request)) * self._block_size

    def allocate(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._block_size) - len(request.block_table)
        if missing <= 0:
            return True
        if self.num_missing(request, num_tokens) > 0:
            return False
        holding = self._holdings.get(request.request_id)
        if holding is None:
            self._holdings[request.request_id] = _Holding(request)
        elif len(request.block_table) == holding.num_found and not request.num_preemptions:
            self._hit(request)  # it starts: a lookup alone, given back, is no hit
        request.block_table.extend(self._pool.allocate(missing))
        if self._windows is not None:
            self._windows.promise(request, len(request.block_table))
        return True

    def slide(self, request: Request, start: int, end: int) -> None:
        if self._windows is not None:
            self._windows.slide(request, start, end)

    def num_needed(self, num_tokens: int) -> int:
        num_blocks = -(-num_tokens // self._block_size)
        return num_blocks if self._windows is None else num_blocks + self._windows.num_needed(num_blocks)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        num_blocks = -(-num_tokens // self._block_size)
        missing = num_blocks - len(request.block_table)
        if self._windows is not None:
            missing += self._windows.num_missing(request, num_blocks)
        return missing - self.num_free_blocks

    def num_freed_by(self, requests: Sequence[Request]) -> int:
        held: dict[int, int] = {}
        for request in requests:
            for block in request.block_table:
                held[block] = held.get(block, 0) + 1
        num_freed = sum(self._pool.ref_count(block) == count for block, count in held.items())
        return num_freed if self._windows is None else num_freed + self._windows.num_promised(requests)

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        written = request.num_computed_tokens if num_tokens is None else num_tokens
        holding = self._holdings.get(request.request_id)
        if not self._sharing or holding is None or not holding.is_shared:
            return
        full = min(written, request.num_tokens) // self._block_size
        while holding.num_committed < full:
            holding.node = self._remember(request, holding.num_committed, holding.node)
            if self._windows is not None:
                self._windows.remember(request, holding.num_committed, holding.node)
            holding.num_committed += 1

    def free(self, request: Request, discard: bool = False) -> None:
        if request.request_id in self._swap:
            (self._swap.discard if discard else self._swap.drop)(request.request_id)
        self._release(request, discard)

    def _release(self, request: Request, discard: bool = False) -> None:
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        if discard:
            self._pool.forget(request.block_table[holding.num_found :])
        if self._windows is not None:
            self._windows.free(
                request, request.block_hashes[holding.num_found : holding.num_committed] if discard else ()
            )
        self._pool.release(request.block_table)
        request.block_table.clear()

    # Host memory

    @property
    def num_swap_blocks(self) -> int:
        return self._swap.num_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        return self._swap.num_free

    def swap_out(self, request: Request, num_tokens: int) -> int:
        holding = self._holdings.get(request.request_id)
        num_kept = 0
        if holding is not None and self._swap.num_blocks and self._windows is None:
            swapped = Swapped(holding.num_found, holding.is_shared)
            nodes = chain_of(holding.node)
            num_kept = self._swap.keep(request.request_id, request.block_table, nodes, num_tokens, swapped)
        self._release(request)
        return num_kept

    def num_swapped_tokens(self, request: Request) -> int:
        return self._swap.num_tokens(request.request_id, request.num_tokens - 1)

    def swap_in(self, request: Request) -> int | None:
        if request.request_id not in self._swap:
            return self.lookup(request)
        if request.block_table:
            raise ValueError(f"swap_in of {request.request_id}, which holds blocks already")
        restored = self._swap.restore(request.request_id, request.num_tokens - 1)
        if restored is None:
            return None
        nodes, table = restored.nodes, request.block_table
        table.extend(restored.blocks)
        holding = _Holding(request, restored.num_found, len(nodes), nodes[-1] if nodes else None, restored.is_shared)
        if table:
            self._holdings[request.request_id] = holding
        if restored.num_tokens == len(nodes) * self._block_size and holding.is_shared:
            self._take_prefix(request, holding)  # the device may have more of it than the host had room for
        return restored.num_tokens + (len(table) - len(restored.blocks)) * self._block_size

    def take_copies(self) -> tuple[KVCopy, ...]:
        return self._swap.take_copies()

    def reset(self) -> bool:
        self._swap.reset()
        self._pool.forget_all()
        for holding in self._holdings.values():
            holding.is_shared = False
        return True

    def check(self) -> None:
        tables: Iterable[Sequence[int]] = (holding.request.block_table for holding in self._holdings.values())
        if self._windows is not None:
            tables = chain(tables, self._windows.tables())
            self._windows.check()
        self._pool.check(tables)
        assert all(holding.request.block_table for holding in self._holdings.values()), "a holder without blocks"
        for holding in self._holdings.values():
            assert holding.num_committed <= len(holding.request.block_table), "more content than blocks"
        self._swap.check()
        assert not any(key in self._swap for key in self._holdings), "a request with blocks is swapped"

    def _window_groups(self, context: CacheContext) -> WindowGroups | None:
        windows = [window for window in context.windows if window is not None]
        if len(context.windows) == 1 or len(windows) != len(context.windows) - 1 or context.windows[0] is not None:
            return None
        step = context.max_step_tokens or context.max_model_len
        return WindowGroups(self._pool, self._block_size, windows, step)

    def _hit(self, request: Request) -> None:
        self._pool.hit(request.block_table)
        if self._windows is not None:
            self._windows.hit(request)

    def _take_prefix(self, request: Request, holding: _Holding) -> None:
        """Blocks of the longest cached prefix, beyond those that it has."""
        table = request.block_table
        for block in islice(self._prefix(request), len(table), None):
            self._pool.acquire(block)
            table.append(block)
            holding.node = self._pool.node(block)
            holding.num_committed += 1
        if table:
            self._holdings[request.request_id] = holding
        if table and self._windows is not None:
            self._windows.take(request, chain_of(holding.node))

    def _prefix(self, request: Request) -> Iterator[int]:
        """Blocks of the longest cached prefix that the request may start on."""
        return self._cached(request) if self._windows is None else self._usable(self._windows, request)

    def _usable(self, windows: WindowGroups, request: Request) -> Iterator[int]:
        """A prefix is as long as its last window is in all groups. None where others hold it and there is no room beside them."""
        blocks = list(self._cached(request))
        num_blocks = windows.num_usable([node for node in map(self._pool.node, blocks) if node is not None])
        taken = sum(not self._pool.ref_count(block) for block in blocks[:num_blocks]) + windows.num_taken(num_blocks)
        return iter(blocks[:num_blocks] if taken <= self.num_free_blocks else ())

    def _cached(self, request: Request) -> Iterator[int]:
        """Of the first group."""
        # Prompt logprobs need the logits of every prompt position, so every one of them is computed.
        if not self._sharing or request.params.prompt_logprobs is not None:
            return
        parent: PrefixNode | None = None
        # One token at least is computed (there must be logits to sample from), also when all blocks are cached.
        for index in range((request.num_tokens - 1) // self._block_size):
            block = self._find(request, index, parent)
            if block is None:
                return
            parent = self._pool.node(block)
            yield block

    def _find(self, request: Request, index: int, parent: PrefixNode | None) -> int | None:
        """The cached block with the content of the request's block `index`."""
        block = self._pool.find(self._hash(request, index))
        node = None if block is None else self._pool.node(block)
        if node is None or not node.matches(parent, self._tokens(request, index), self._extra(request, index)):
            return None
        return block

    def _remember(self, request: Request, index: int, parent: PrefixNode | None) -> PrefixNode:
        """Make the request's block `index` findable, unless its content or a colliding one already is."""
        digest, tokens, extra = self._hash(request, index), self._tokens(request, index), self._extra(request, index)
        known = self._pool.find(digest)
        node = None if known is None else self._pool.node(known)
        if node is not None and node.matches(parent, tokens, extra):
            return node
        made = PrefixNode(digest, tokens, extra, parent)
        if known is None:
            self._pool.remember(request.block_table[index], digest, made)
        return made

    def _hash(self, request: Request, index: int) -> bytes:
        """Chain hash of block `index`; hashes stay with the request, also over preemption: known ids never change."""
        hashes = request.block_hashes
        for missing in range(len(hashes), index + 1):
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(self.hash_block(parent, self._tokens(request, missing), self._extra(request, missing)))
        return hashes[index]

    def _tokens(self, request: Request, index: int) -> list[int]:
        return request.token_ids(index * self._block_size, (index + 1) * self._block_size)

    def _extra(self, request: Request, index: int) -> bytes:
        return first_block_keys(request) if index == 0 else b""
