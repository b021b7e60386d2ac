"""What a cache may have copied between device and host memory, looked at before it is done."""

from __future__ import annotations

from collections.abc import Iterable

from core.cache.kv_cache import KVCache, KVCopy
from core.errors import shown

SWAP_METHODS = ("swap_out", "num_swapped_tokens", "swap_in", "take_copies")


def can_swap(cache: KVCache) -> bool:
    """Whether it has what plugin API 1.2 has for host memory."""
    return all(callable(getattr(cache, name, None)) for name in SWAP_METHODS)


class CopyChecks:
    """Copies go to where nobody else reads, and come from where something was put."""

    def __init__(self, num_blocks: int, num_swap_blocks: int):
        self._num_blocks = num_blocks
        self._num_swap_blocks = num_swap_blocks
        self._written: set[int] = set()  # host blocks
        self._fresh: set[int] = set()  # device blocks that `swap_in` gave since the last copies, and nobody held before

    def gave(self, blocks: Iterable[int]) -> None:
        self._fresh.update(blocks)

    def check(self, copies: object) -> tuple[KVCopy, ...]:
        """Raises ValueError saying what is wrong with them."""
        if not isinstance(copies, tuple | list) or not all(type(copy) is KVCopy for copy in copies):
            raise ValueError(f"take_copies returned {shown(copies)}, which are no KVCopy")
        for copy in copies:
            flaw = self._flaw(copy)
            if flaw:
                raise ValueError(f"take_copies returned {shown(copy)}: {flaw}")
        self._fresh.clear()
        return tuple(copies)

    def _flaw(self, copy: KVCopy) -> str:
        device, host = copy.device_blocks, copy.host_blocks
        if type(device) is not tuple or type(host) is not tuple or len(device) != len(host) or not device:
            return "its blocks are no two tuples of one length"
        if not _are_blocks(device, self._num_blocks) or not _are_blocks(host, self._num_swap_blocks):
            return f"there are {self._num_blocks} device blocks and {self._num_swap_blocks} host blocks"
        if len(set(host if copy.direction == "out" else device)) != len(host):
            return "it writes a block twice"
        if copy.direction not in ("out", "in"):
            return "its direction is neither out nor in"
        if copy.direction == "out":
            self._written.update(host)
            return ""
        if not self._written.issuperset(host):
            return "it reads a host block that was never written"
        return "" if self._fresh.issuperset(device) else "it writes a block that swap_in did not give, or others hold"


def _are_blocks(blocks: tuple[object, ...], num_blocks: int) -> bool:
    return all(type(block) is int and 0 <= block < num_blocks for block in blocks)
