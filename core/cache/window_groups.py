"""Books of the groups of sliding layers, beside the table of the full ones: each has a table per request that begins where
the window does.

What a request may still need of a group is set aside when its positions are promised: the blocks of one window and one step,
or of all positions where those are fewer. So a prompt in chunks never runs out half-way, and nothing is taken for positions
that will have left the window by then. A block counts for each of its holders, also where they share it: whoever lets go of
a shared one takes another in its place, and must find it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from core.cache.block_pool import BlockPool
from core.cache.prefix import PrefixNode
from core.request import GroupTable, Request


@dataclass(frozen=True)
class WindowSize:
    """How many blocks a request can need of a group at once, in blocks of `block_size` tokens."""

    window: int  # tokens that a token sees, itself included
    step: int  # most tokens of a request in a step
    block_size: int

    @cached_property
    def most(self) -> int:
        """The tokens of a step and the window of their first one, wherever in a block they begin."""
        return (self.window + self.step + 2 * self.block_size - 3) // self.block_size

    def first(self, position: int) -> int:
        """The block with the oldest position that the token at `position` sees."""
        return max(position - self.window + 1, 0) // self.block_size


def num_blocks_needed(num_tokens: int, block_size: int, windows: Sequence[int | None], step: int) -> int:
    """Blocks that a request of `num_tokens` needs over all groups, at most."""
    full = -(-num_tokens // block_size)
    sizes = (full if window is None else WindowSize(window, step, block_size).most for window in windows)
    return sum(min(full, size) for size in sizes)


def longest_request(num_blocks: int, block_size: int, num_needed: Callable[[int], int]) -> int:
    """Tokens of the longest request that so many blocks hold. `num_needed`: blocks of so many tokens, at most."""
    counts = range(1, num_blocks + 1)
    return block_size * bisect_right(counts, num_blocks, key=lambda full: num_needed(full * block_size))


@dataclass(frozen=True, slots=True)
class _Kind:
    """The groups of one window: their tables begin and end at the same blocks."""

    size: WindowSize
    marks: tuple[bytes, ...]  # of each group: a content's hash in it ends so

    def due(self, first: int, num_blocks: int, num_held: int) -> int:
        """Blocks that a request of `num_blocks` can come to have at once, in tables that begin at `first` and hold so many."""
        return len(self.marks) * max(num_held, min(num_blocks - first, self.size.most))


@dataclass(slots=True)
class _Tables:
    """Of one request in the groups of a kind: blocks of positions [first * block_size, …); those before have left the window."""

    groups: list[tuple[int, ...]]
    first: int = 0

    @property
    def num_held(self) -> int:
        """Blocks of each group."""
        return len(self.groups[0])


@dataclass(slots=True)
class _Share:
    """Of one request: its tables by kind, and how many blocks are promised to it, those that it has among them."""

    request: Request
    kinds: list[_Tables]
    num_promised: int = 0

    def publish(self) -> None:
        self.request.group_tables = tuple(
            [GroupTable(tables.first, blocks) for tables in self.kinds for blocks in tables.groups]
        )


class WindowGroups:
    """The groups after the first, those of a window side by side. Blocks come from the pool that all groups share.

    Invariant: what is set aside is free, so that `slide` always finds its blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int], step: int):
        self._pool = pool
        self._block_size = block_size
        self._kinds = []
        for window, members in groupby(enumerate(windows, start=1), key=lambda numbered: numbered[1]):
            marks = tuple(b"/%d" % group for group, _ in members)
            self._kinds.append(_Kind(WindowSize(window, step, block_size), marks))
        self._shares: dict[str, _Share] = {}  # by request id
        self._num_promised = 0  # over all shares
        self._num_held = 0  # blocks that somebody holds, each counted once

    @property
    def num_set_aside(self) -> int:
        """Free blocks of the pool that are promised already."""
        return self._num_promised - self._num_held

    def num_needed(self, num_blocks: int) -> int:
        """Blocks of these groups for a request that has `num_blocks` in the first one, at most."""
        return sum(kind.due(0, num_blocks, 0) for kind in self._kinds)

    def num_missing(self, request: Request, num_blocks: int) -> int:
        """What a request needs beyond its promise to have `num_blocks` in the first group."""
        share = self._shares.get(request.request_id)
        if share is None:
            return self.num_needed(num_blocks)
        return max(self._due(share, num_blocks) - share.num_promised, 0)

    def num_promised(self, requests: Sequence[Request]) -> int:
        """Blocks that are free for others once these are freed."""
        shares = (self._shares.get(request.request_id) for request in requests)
        return sum(share.num_promised for share in shares if share is not None)

    def promise(self, request: Request, num_blocks: int) -> None:
        """The caller has seen that no more is missing than is free."""
        share = self._share(request)
        self._set_promise(share, self._due(share, num_blocks))

    def slide(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end) are computed next: lets go of what none of them sees, and takes what they are written to.

        A step in flight may still read what goes back here: device work runs in the order of planning, so a step that is
        given these blocks writes them after it. Nothing later starts before `start`, not even after rejected drafts.
        Raises ValueError where the step is longer than was said at the start, and the pool has no blocks to spare.
        """
        share, last = self._shares[request.request_id], -(-end // self._block_size)
        missing, promised = [], 0
        for kind, tables in zip(self._kinds, share.kinds, strict=True):
            self._drop_before(tables, kind.size.first(start))
            count = max(last - tables.first - tables.num_held, 0)
            missing.append(count)
            promised += kind.due(tables.first, len(request.block_table), tables.num_held + count)
        self._set_promise(share, promised)
        if self._pool.num_free < self.num_set_aside:
            raise ValueError(f"a step of {end - start} tokens of one request, and no blocks for them")
        for count, tables in zip(missing, share.kinds, strict=True):
            self._extend(tables, count)
        share.publish()

    def free(self, request: Request, wrong: Sequence[bytes] = ()) -> None:
        """`wrong`: hashes of contents that are not to be found again, also where their blocks have left the window."""
        for digest in wrong:
            found = (self._pool.find(digest + mark) for kind in self._kinds for mark in kind.marks)
            self._pool.forget([block for block in found if block is not None])
        share = self._shares.pop(request.request_id, None)
        if share is not None:
            for tables in share.kinds:
                for blocks in tables.groups:
                    self._release(blocks)
            self._num_promised -= share.num_promised
            request.group_tables = ()

    # Prefixes

    def num_usable(self, nodes: Sequence[PrefixNode]) -> int:
        """How much of a chain of contents, found in the first group, can be started on: its last window is in all others."""
        end = len(nodes)
        while end:
            missing = max(self._last_missing(nodes, kind, end) for kind in self._kinds)
            if missing < 0:
                break
            end = missing
        return end

    def num_taken(self, num_blocks: int) -> int:
        """Blocks that `take` takes, or sets aside where others hold them."""
        end = num_blocks * self._block_size
        return sum(len(kind.marks) * (num_blocks - kind.size.first(end)) for kind in self._kinds)

    def take(self, request: Request, nodes: Sequence[PrefixNode]) -> None:
        """Start a request on usable contents: takes the last window of them."""
        share = self._share(request)
        for kind, tables in zip(self._kinds, share.kinds, strict=True):
            tables.first = kind.size.first(len(nodes) * self._block_size)
            tables.groups = [self._taken(nodes[tables.first :], mark) for mark in kind.marks]
        self._set_promise(share, self._due(share, len(nodes)))
        share.publish()

    def hit(self, request: Request) -> None:
        """The request starts on what it has taken."""
        for tables in self._shares[request.request_id].kinds:
            for blocks in tables.groups:
                self._pool.hit(blocks)

    def remember(self, request: Request, index: int, node: PrefixNode) -> None:
        """Make the request's blocks `index` findable, where it has them still and their content is not."""
        for kind, tables in zip(self._kinds, self._shares[request.request_id].kinds, strict=True):
            at = index - tables.first
            for mark, blocks in zip(kind.marks, tables.groups, strict=True):
                digest = node.hash + mark
                if 0 <= at < len(blocks) and self._pool.find(digest) is None:
                    self._pool.remember(blocks[at], digest, PrefixNode(digest, node.token_ids, node.extra, node.parent))

    def tables(self) -> Iterator[Sequence[int]]:
        """Of all requests, for the pool's check."""
        for share in self._shares.values():
            for tables in share.kinds:
                yield from tables.groups

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert self._num_promised == sum(share.num_promised for share in self._shares.values()), (
            "promises do not add up"
        )
        assert self._num_held == len({block for table in self.tables() for block in table}), "held blocks do not add up"
        assert 0 <= self.num_set_aside <= self._pool.num_free, "promised blocks are not there"
        for share in self._shares.values():
            assert share.num_promised == self._due(share, len(share.request.block_table)), "a promise is out of date"
            for tables in share.kinds:
                assert {len(blocks) for blocks in tables.groups} == {tables.num_held}, "groups of a window differ"

    def _share(self, request: Request) -> _Share:
        share = self._shares.get(request.request_id)
        if share is None:
            kinds = [_Tables([()] * len(kind.marks)) for kind in self._kinds]
            share = self._shares[request.request_id] = _Share(request, kinds)
        return share

    def _due(self, share: _Share, num_blocks: int) -> int:
        """Blocks that the request can come to have at once from now on."""
        pairs = zip(self._kinds, share.kinds, strict=True)
        return sum(kind.due(tables.first, num_blocks, tables.num_held) for kind, tables in pairs)

    def _set_promise(self, share: _Share, num_blocks: int) -> None:
        self._num_promised += num_blocks - share.num_promised
        share.num_promised = num_blocks

    def _drop_before(self, tables: _Tables, first: int) -> None:
        num_gone = first - tables.first
        if not 0 <= num_gone <= tables.num_held:
            raise ValueError(f"block {first} is not in the window, which has {tables.num_held} from {tables.first}")
        if num_gone:
            self._release([block for blocks in tables.groups for block in blocks[:num_gone]])
            tables.groups = [blocks[num_gone:] for blocks in tables.groups]
            tables.first = first

    def _extend(self, tables: _Tables, count: int) -> None:
        """By `count` blocks in each group."""
        blocks = self._pool.allocate(count * len(tables.groups))
        self._num_held += len(blocks)
        tables.groups = [
            (*had, *blocks[index * count : (index + 1) * count]) for index, had in enumerate(tables.groups)
        ]

    def _release(self, blocks: Sequence[int]) -> None:
        self._num_held -= sum([self._pool.ref_count(block) == 1 for block in blocks])
        self._pool.release(blocks)

    def _taken(self, nodes: Sequence[PrefixNode], mark: bytes) -> tuple[int, ...]:
        """The blocks of a group with these contents, held from now on."""
        blocks = []
        for node in nodes:
            block = self._find(node, mark)
            assert block is not None, "a prefix was taken that is not there"
            self._num_held += not self._pool.ref_count(block)
            self._pool.acquire(block)
            blocks.append(block)
        return tuple(blocks)

    def _last_missing(self, nodes: Sequence[PrefixNode], kind: _Kind, end: int) -> int:
        """The last of the contents in the window before `end` that a group does not have; -1: all have them all."""
        first = kind.size.first(end * self._block_size)
        indices = range(end - 1, first - 1, -1)
        return next((i for i in indices if any(self._find(nodes[i], mark) is None for mark in kind.marks)), -1)

    def _find(self, node: PrefixNode, mark: bytes) -> int | None:
        block = self._pool.find(node.hash + mark)
        found = None if block is None else self._pool.node(block)
        return block if found is not None and found.matches(node.parent, node.token_ids, node.extra) else None
