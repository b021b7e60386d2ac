"""The pool of KV blocks: who is free, who is held how often, and which content can be found again.

Each block is in exactly one of three states, so `blank + used + cached = total`:
used (ref count > 0), cached (ref count 0, content findable, evictable in LRU order) or blank (ref count 0, no content).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from core.cache.prefix import PrefixNode


class ContentWatcher(Protocol):
    """Who is told when content is about to be found no more."""

    def evicted(self, block: int, node: PrefixNode) -> None:
        """The block goes to somebody else, who will write over it in the step in hand."""
        ...

    def forgotten(self, node: PrefixNode) -> None:
        """By `forget`: the content may be wrong."""
        ...


class BlockPool:
    """Block ids 0 … num_blocks - 1. Every operation is O(1) per block.

    Content that was hit `pin_hits` times is evicted after all other (0: none is). At most `max_pinned` cached blocks are kept
    so; of more, the least recently used goes back among the others, and has to earn its place again.
    """

    def __init__(self, num_blocks: int, pin_hits: int = 0, max_pinned: int = 0):
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: nothing is ever taken from its middle
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pinned: OrderedDict[int, None] = OrderedDict()  # likewise, and evicted when those are gone
        self._pin_hits, self._max_pinned = pin_hits, max_pinned
        self._hits = [0] * num_blocks  # of the content of a findable block
        self._nodes: list[PrefixNode | None] = [None] * num_blocks  # content of a findable block
        self._index: dict[bytes, int] = {}  # content hash -> block
        self.watcher: ContentWatcher | None = None

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank ones and evictable ones."""
        return len(self._blank) + len(self._evictable) + len(self._pinned)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._evictable) + len(self._pinned)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with ref count 1; evicts least recently used content once blank blocks are gone."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """One more holder of a used or cached block."""
        if not self._ref_counts[block]:
            if self._nodes[block] is None:
                raise ValueError(f"block {block} is blank: it has no content to share")
            del (self._pinned if block in self._pinned else self._evictable)[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. `blocks` are in position order: a sequence's tail is evicted before its head."""
        for block in reversed(blocks):
            if not self._ref_counts[block]:
                raise ValueError(f"double free of block {block}")
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._nodes[block] is None:
                self._blank.append(block)
            else:
                self._keep(block)

    def hit(self, blocks: Sequence[int]) -> None:
        """A request starts on what these blocks hold."""
        for block in blocks:
            self._hits[block] += 1

    def find(self, content_hash: bytes) -> int | None:
        """The block under this hash. A hash is a hint: the caller compares `node(block)` with what it looks for."""
        return self._index.get(content_hash)

    def node(self, block: int) -> PrefixNode | None:
        return self._nodes[block]

    def remember(self, block: int, content_hash: bytes, node: PrefixNode) -> None:
        """Make a used block findable. The hash must be free and the block without content."""
        if not self._ref_counts[block] or self._nodes[block] is not None or content_hash in self._index:
            raise ValueError(f"block {block} cannot be cached: it is unused, cached already, or its hash is taken")
        self._index[content_hash] = block
        self._nodes[block] = node

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the content of blocks. Whoever holds one keeps it."""
        for block in blocks:
            node, self._nodes[block] = self._nodes[block], None
            if node is not None:
                del self._index[node.hash]
                if self.watcher is not None:
                    self.watcher.forgotten(node)
                self._hits[block] = 0
                if not self._ref_counts[block]:
                    del (self._pinned if block in self._pinned else self._evictable)[block]
                    self._blank.append(block)

    def forget_all(self) -> None:
        """Drop all content. Used blocks stay used."""
        self._index.clear()
        self._nodes = [None] * self.num_blocks
        for kept in (self._evictable, self._pinned):
            self._blank.extend(kept)
            kept.clear()
        self._hits = [0] * self.num_blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError when the books do not balance; `tables` are the block tables of all holders."""
        holders = Counter(block for table in tables for block in table)
        counts = {block: count for block, count in enumerate(self._ref_counts) if count}
        assert counts == dict(holders), f"ref counts {counts} differ from holders {dict(holders)}"
        free = [*self._blank, *self._evictable, *self._pinned]
        assert len(free) == len(set(free)), "a block is twice in the free lists"
        assert not set(free) & set(counts), "a free block is in a block table"
        assert len(free) + len(counts) == self.num_blocks, "blank + cached + used is not the pool"
        content = {block: node.hash for block, node in enumerate(self._nodes) if node is not None}
        assert {digest: block for block, digest in content.items()} == self._index, "index and contents differ"
        assert len(content) == len(self._index), "two blocks under one hash"
        cached = [*self._evictable, *self._pinned]
        assert all(block in content for block in cached), "an evictable block has no content"
        assert len(self._pinned) <= self._max_pinned, "more blocks are pinned than may be"
        assert not any(block in content for block in self._blank), "a blank block has content"

    def _keep(self, block: int) -> None:
        """Its content stays findable though nobody holds it."""
        if not self._max_pinned or self._hits[block] < self._pin_hits:
            self._evictable[block] = None
            return
        self._pinned[block] = None
        if len(self._pinned) > self._max_pinned:
            oldest, _ = self._pinned.popitem(last=False)
            self._hits[oldest] = 0
            self._evictable[oldest] = None

    def _evict(self) -> int:
        block, _ = (self._evictable or self._pinned).popitem(last=False)
        self._hits[block] = 0
        node = self._nodes[block]
        assert node is not None
        if self.watcher is not None:
            self.watcher.evicted(block, node)
        self._nodes[block] = None
        del self._index[node.hash]
        return block
