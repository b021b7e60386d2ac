"""Host memory for the KV of preempted requests: which host block keeps what, and which copies are due. No tensors, no torch.

The cache collects copies, the engine takes them after `schedule` and has the executor make them, in order, before the step's
forward pass. So a block may be given on as soon as its copy is noted: device work runs in the order of planning.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.cache.block_pool import BlockPool
from core.cache.kv_cache import Direction, KVCopy
from core.cache.prefix import PrefixNode


@dataclass(slots=True, eq=False)
class Content:
    """A full block that can be told by its hash, and the host block that is set aside for it."""

    node: PrefixNode
    host_block: int
    num_waiting: int = 0  # swapped requests that need it
    copied: bool = False  # False: the device has it still


@dataclass(slots=True)
class Swapped:
    """What is kept of one request's KV: the head of its sequence."""

    num_found: int  # blocks at the head that others have written
    is_shared: bool  # False: what it writes is not to be found by others
    num_tokens: int = 0  # positions [0, num_tokens)
    parts: list[Content | int] = field(default_factory=list)  # in position order; an int: a host block of its own


@dataclass(frozen=True, slots=True)
class Restored:
    """Device blocks that a request has again. `nodes`: contents of those at the head that are known by hash."""

    blocks: list[int]
    num_tokens: int
    num_found: int
    is_shared: bool
    nodes: list[PrefixNode]


class Copies:
    """Copies that are due, as few and as large as their order allows."""

    def __init__(self) -> None:
        self._runs: list[tuple[Direction, list[int], list[int]]] = []
        self._written: set[int] = set()  # by the last run

    def add(self, direction: Direction, device_block: int, host_block: int) -> None:
        target = host_block if direction == "out" else device_block
        if not self._runs or self._runs[-1][0] != direction or target in self._written:
            self._runs.append((direction, [], []))
            self._written.clear()
        self._written.add(target)
        self._runs[-1][1].append(device_block)
        self._runs[-1][2].append(host_block)

    def take(self) -> tuple[KVCopy, ...]:
        if not self._runs:
            return ()
        runs, self._runs = self._runs, []
        self._written.clear()
        return tuple(KVCopy(direction, tuple(device), tuple(host)) for direction, device, host in runs)


class SwapSpace:
    """Books of `num_blocks` host blocks, beside those of the device's pool.

    A block of a swapped request is one of two things:

    - Its own: a tail, or a block that cannot be told by its hash. It is copied out at once and back into a new block.
    - Content: a full block that the pool can find by its hash. A host block is set aside for it, once for all requests that
      wait for it. It is copied only when the device is about to lose it, that is when its block is evicted (which can only be
      once nobody holds it), and copied back only where the device has lost it. So what others still use is not copied and
      outlives them all the same, no content is copied twice, and a request that comes back soon finds its blocks in place.

    A host block whose content nobody waits for keeps it, until the block is needed (least recently wanted first): a request
    that is swapped out again has its head there. Content that is forgotten as wrong (`BlockPool.forget`) is lost for those
    who wait for it, too: less of their KV is kept.
    """

    def __init__(self, num_blocks: int, pool: BlockPool, block_size: int):
        self.num_blocks = num_blocks
        self._pool = pool
        self._block_size = block_size
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._contents: dict[bytes, Content] = {}  # by hash
        self._idle: OrderedDict[bytes, Content] = OrderedDict()  # of these, copied and waited for by nobody
        self._swapped: dict[str, Swapped] = {}  # by request id
        self._copies = Copies()
        pool.watcher = self

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._swapped

    def __bool__(self) -> bool:
        """Whether any request is swapped."""
        return bool(self._swapped)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    def num_tokens(self, request_id: str, limit: int) -> int:
        """What `restore` would bring back."""
        swapped = self._swapped.get(request_id)
        if swapped is None:
            return 0
        return swapped.num_tokens if swapped.num_tokens <= limit else self._num_within(swapped, limit)

    def take_copies(self) -> tuple[KVCopy, ...]:
        return self._copies.take()

    def keep(
        self, request_id: str, blocks: Sequence[int], nodes: Sequence[PrefixNode], num_tokens: int, swapped: Swapped
    ) -> int:
        """Keep the longest head of `num_tokens` positions that finds room, in `swapped`. Returns its tokens.

        `blocks` are still held; `nodes` are the contents of those at the head that are known by hash.
        """
        size = self._block_size
        for index in range(min(-(-num_tokens // size), len(blocks))):
            full = (index + 1) * size <= num_tokens
            part = self._keep_block(blocks[index], nodes[index] if full and index < len(nodes) else None)
            if part is None:
                break
            swapped.parts.append(part)
        swapped.num_tokens = min(len(swapped.parts) * size, num_tokens)
        if swapped.parts:
            self._swapped[request_id] = swapped
        return swapped.num_tokens

    def restore(self, request_id: str, limit: int) -> Restored | None:
        """Device blocks for what is kept, up to `limit` positions; its host blocks are given back.

        None, with nothing changed, when device blocks lack. A block that others may read ends within the limit: the position
        after it is the first to be written.
        """
        swapped = self._swapped[request_id]
        parts, num_tokens = self._within(swapped, limit), self._num_within(swapped, limit)
        found = [self._on_device(part.node) if isinstance(part, Content) else None for part in parts]
        held = [block for block in found if block is not None]
        for block in held:
            self._pool.acquire(block)
        if len(parts) - len(held) > self._pool.num_free:
            self._pool.release(held)
            return None
        fresh = iter(self._pool.allocate(len(parts) - len(held)))
        blocks = [next(fresh) if block is None else block for block in found]
        for part, block, was_found in zip(parts, blocks, found, strict=True):
            if was_found is None:
                self._copy_in(part, block)
        nodes = [part.node for part in _contents_at_head(parts)]
        self.drop(request_id)
        return Restored(blocks, num_tokens, min(swapped.num_found, len(nodes)), swapped.is_shared, nodes)

    def drop(self, request_id: str) -> list[PrefixNode]:
        """The request needs nothing any more. Returns the contents that it has written itself."""
        swapped = self._swapped.pop(request_id, None)
        if swapped is None:
            return []
        for part in swapped.parts:
            self._give_back(part)
        return [part.node for part in swapped.parts[swapped.num_found :] if isinstance(part, Content)]

    def discard(self, request_id: str) -> None:
        """Like `drop`, and what the request has written may be wrong: nobody is to find it, on the device neither."""
        for node in self.drop(request_id):
            block = self._on_device(node)
            if block is None:
                self.forgotten(node)
            else:
                self._pool.acquire(block)
                self._pool.forget([block])
                self._pool.release([block])

    def evicted(self, block: int, node: PrefixNode) -> None:
        """The pool is about to give this block, with this content, to somebody else."""
        content = self._of(node)
        if content is not None and not content.copied:
            self._copies.add("out", block, content.host_block)
            content.copied = True

    def forgotten(self, node: PrefixNode) -> None:
        """This content may be wrong."""
        content = self._of(node)
        if content is None:
            return
        for request_id, swapped in list(self._swapped.items()):
            if content in swapped.parts:
                self._cut(request_id, swapped, swapped.parts.index(content))
        if self._idle.pop(node.hash, None) is not None:
            self._blank.append(content.host_block)
            del self._contents[node.hash]

    def reset(self) -> None:
        """Forget everything. Swapped requests are computed again."""
        for request_id in list(self._swapped):
            self.drop(request_id)
        for content in self._idle.values():
            self._blank.append(content.host_block)
        self._idle.clear()
        self._contents.clear()

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        parts = [part for swapped in self._swapped.values() for part in swapped.parts]
        waiting = Counter(part.node.hash for part in parts if isinstance(part, Content))
        used = [part for part in parts if isinstance(part, int)]
        used += [content.host_block for content in self._contents.values()]
        assert sorted([*self._blank, *used]) == list(range(self.num_blocks)), "a host block is lost, or used twice"
        for digest, content in self._contents.items():
            assert content.num_waiting == waiting[digest], "a content's count is not that of who waits for it"
            assert content.copied or self._on_device(content.node) is not None, "a content is nowhere"
            assert (digest in self._idle) == (not content.num_waiting), "a content that nobody waits for is not idle"
        for swapped in self._swapped.values():
            room = len(swapped.parts) * self._block_size
            assert 0 < swapped.num_tokens <= room < swapped.num_tokens + self._block_size, "tokens without blocks"

    def _keep_block(self, block: int, node: PrefixNode | None) -> Content | int | None:
        """None: no host block is free."""
        content = None if node is None else self._of(node)
        if content is None and not self.num_free:
            return None
        if content is None and (node is None or node.hash in self._contents or self._on_device(node) is None):
            own = self._allocate()
            self._copies.add("out", block, own)
            return own
        if content is None:
            assert node is not None
            content = self._contents[node.hash] = Content(node, self._allocate())
        self._idle.pop(content.node.hash, None)
        content.num_waiting += 1
        return content

    def _copy_in(self, part: Content | int, block: int) -> None:
        self._copies.add("in", block, part if isinstance(part, int) else part.host_block)
        if isinstance(part, Content) and self._pool.find(part.node.hash) is None:
            self._pool.remember(block, part.node.hash, part.node)

    def _within(self, swapped: Swapped, limit: int) -> list[Content | int]:
        """The parts of the first `limit` positions, the last one cut only where it is the request's own."""
        parts = swapped.parts[: max(-(-limit // self._block_size), 0)]
        if parts and isinstance(parts[-1], Content) and len(parts) * self._block_size > limit:
            parts.pop()
        return parts

    def _num_within(self, swapped: Swapped, limit: int) -> int:
        return min(len(self._within(swapped, limit)) * self._block_size, swapped.num_tokens, limit)

    def _cut(self, request_id: str, swapped: Swapped, num_blocks: int) -> None:
        for part in swapped.parts[num_blocks:]:
            self._give_back(part)
        del swapped.parts[num_blocks:]
        swapped.num_tokens = num_blocks * self._block_size
        if not num_blocks:
            del self._swapped[request_id]

    def _give_back(self, part: Content | int) -> None:
        if isinstance(part, int):
            self._blank.append(part)
            return
        part.num_waiting -= 1
        if part.num_waiting:
            return
        if part.copied:
            self._idle[part.node.hash] = part
        else:
            self._blank.append(part.host_block)
            del self._contents[part.node.hash]

    def _allocate(self) -> int:
        if self._blank:
            return self._blank.pop()
        digest, content = self._idle.popitem(last=False)
        del self._contents[digest]
        return content.host_block

    def _of(self, node: PrefixNode) -> Content | None:
        content = self._contents.get(node.hash)
        return content if content is not None and _is_same(content.node, node) else None

    def _on_device(self, node: PrefixNode) -> int | None:
        block = self._pool.find(node.hash)
        known = None if block is None else self._pool.node(block)
        return block if known is not None and _is_same(known, node) else None


def _is_same(a: PrefixNode, b: PrefixNode) -> bool:
    return a is b or a.matches(b.parent, b.token_ids, b.extra)


def _contents_at_head(parts: Sequence[Content | int]) -> Iterator[Content]:
    for part in parts:
        if isinstance(part, int):
            return
        yield part
