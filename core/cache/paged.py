"""Paged KV bookkeeping with prefix sharing: the `paged` choice of config group `cache`. No tensors, no torch.

Ideas: PagedAttention (Kwon et al., SOSP'23) for blocks and tables; vLLM V1 for hash-chained sharing of full blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from core.cache.block_pool import BlockPool
from core.cache.kv_cache import CacheContext, CacheSettings
from core.cache.prefix import ROOT_HASH, PrefixNode, block_hash, first_block_keys
from core.request import Request


@dataclass(slots=True)
class _Holding:
    """A request that holds blocks, and how far its content is known to the index."""

    request: Request
    num_found: int = 0  # blocks at the head that were written by others
    num_committed: int = 0  # full blocks whose KV is written and hashed
    node: PrefixNode | None = None  # content of the last of them


class PagedCache:
    """Fixed-size blocks, ref counted; full blocks are shared by content between requests of one tenant and salt.

    A block table only grows until `free`: a duplicate of a cached block is kept, not replaced, so that tables already
    handed to the device stay true.
    """

    class Settings(CacheSettings):
        enable_prefix_caching: bool = Field(default=True, description="share full blocks of equal prefixes")

    hash_block = staticmethod(block_hash)

    def __init__(self, settings: Settings, context: CacheContext):
        self._block_size = settings.block_size
        self._sharing = settings.enable_prefix_caching
        self._pool = BlockPool(context.num_blocks)
        self._holdings: dict[str, _Holding] = {}  # by request id; exactly the requests with blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def lookup(self, request: Request) -> int:
        if request.block_table:
            raise ValueError(f"lookup of {request.request_id}, which holds blocks already")
        # Prompt logprobs need the logits of every prompt position, so every one of them is computed.
        if not self._sharing or request.params.prompt_logprobs is not None:
            return 0
        holding = _Holding(request)
        # One token at least is computed (there must be logits to sample from), also when all blocks are cached.
        for index in range((request.num_tokens - 1) // self._block_size):
            block = self._find(request, index, holding.node)
            if block is None:
                break
            self._pool.acquire(block)
            request.block_table.append(block)
            holding.node = self._pool.node(block)
        holding.num_found = holding.num_committed = len(request.block_table)
        if request.block_table:
            self._holdings[request.request_id] = holding
        return holding.num_committed * self._block_size

    def allocate(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._block_size) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
            return False
        if request.request_id not in self._holdings:
            self._holdings[request.request_id] = _Holding(request)
        request.block_table.extend(self._pool.allocate(missing))
        return True

    def num_freed_by(self, requests: Sequence[Request]) -> int:
        held: dict[int, int] = {}
        for request in requests:
            for block in request.block_table:
                held[block] = held.get(block, 0) + 1
        return sum(self._pool.ref_count(block) == count for block, count in held.items())

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        written = request.num_computed_tokens if num_tokens is None else num_tokens
        holding = self._holdings.get(request.request_id)
        if not self._sharing or holding is None:
            return
        full = min(written, request.num_tokens) // self._block_size
        while holding.num_committed < full:
            holding.node = self._remember(request, holding.num_committed, holding.node)
            holding.num_committed += 1

    def free(self, request: Request, discard: bool = False) -> None:
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        if discard:
            self._pool.forget(request.block_table[holding.num_found :])
        self._pool.release(request.block_table)
        request.block_table.clear()

    def reset(self) -> bool:
        if self._holdings:
            return False
        self._pool.forget_all()
        return True

    def check(self) -> None:
        self._pool.check(holding.request.block_table for holding in self._holdings.values())
        assert all(holding.request.block_table for holding in self._holdings.values()), "a holder without blocks"
        for holding in self._holdings.values():
            assert holding.num_committed <= len(holding.request.block_table), "more content than blocks"

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
