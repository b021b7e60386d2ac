"""The KV cache's bookkeeping as the scheduler sees it: which block ids hold which tokens. No tensor in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from core.errors import ConfigError
from core.request import Request

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class CacheSettings(BaseModel):
    """What the pipeline needs to know of every cache; a cache's `Settings` extends this class."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    block_size: Literal[16, 32, 64] = Field(default=16, description="tokens per block; 64 suits sequences over 8K")
    memory: str | float = Field(
        default=0.15, description="KV memory: '2GiB', or a fraction of the memory free at start"
    )
    num_blocks: int | None = Field(
        default=None, ge=1, description="overrides `memory`: blocks over all layers, however they are grouped"
    )
    window_groups: bool = Field(
        default=True, description="give back KV that has left the window of sliding layers, where the components can"
    )
    swap_memory: str | float = Field(
        default="0", description="host memory for KV of preempted requests: '8GiB', a fraction of what is free, or 0"
    )
    num_swap_blocks: int | None = Field(default=None, ge=0, description="overrides `swap_memory`")
    swap_checksums: bool = Field(default=False, description="compare the KV that comes back with what went out; slow")

    @model_validator(mode="after")
    def _swap_keys_go_together(self) -> Self:
        if self.swap_checksums and not self.swaps:
            raise ValueError(
                "cache.swap_checksums compares KV that was in host memory, and there is none; set cache.swap_memory (4GiB) or "
                "cache.num_swap_blocks, or cache.swap_checksums=false"
            )
        return self

    @property
    def swaps(self) -> bool:
        """Whether there is to be host memory for the KV of preempted requests."""
        return self.num_swap_blocks > 0 if self.num_swap_blocks is not None else _budget(self.swap_memory, 1 << 30) > 0

    @field_validator("memory")
    @classmethod
    def _legal_memory(cls, memory: str | float) -> str | float:
        return _legal(memory, least=1)

    @field_validator("swap_memory")
    @classmethod
    def _legal_swap_memory(cls, memory: str | float) -> str | float:
        return _legal(memory, least=0)

    def memory_bytes(self, available: int | None) -> int:
        """The budget in bytes, of `available` bytes that are free. Raises ConfigError for a fraction of the unknown."""
        if available is None and not str(self.memory).endswith(tuple(_UNITS)):
            raise ConfigError(
                f"cache.memory={self.memory} is a fraction of the free memory, and the executor does not know it; "
                "write a size such as cache.memory=2GiB, or cache.num_blocks"
            )
        return _budget(self.memory, available or 0)

    def swap_memory_bytes(self, available: int | None) -> int:
        """The same of host memory for swapped KV, of `available` bytes of host memory that are free."""
        if available is None and not str(self.swap_memory).endswith(tuple(_UNITS)):
            raise ConfigError(
                f"cache.swap_memory={self.swap_memory} is a fraction of the free host memory, which this system does not "
                "tell; write a size such as cache.swap_memory=8GiB, or cache.num_swap_blocks"
            )
        return _budget(self.swap_memory, available or 0)


def _legal(memory: str | float, least: int) -> str | float:
    try:
        budget = _budget(memory, available=1 << 30)
        if budget >= 1 or (least == 0 and not budget and float(str(memory)) == 0):
            return memory
    except ValueError:
        pass
    raise ValueError("write a fraction in (0, 1], or a size such as 512MiB or 2GiB" + ("" if least else ", or 0"))


def _budget(memory: str | float, available: int) -> int:
    text = str(memory)
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    fraction = float(text)
    return int(available * fraction) if fraction <= 1 else 0


@dataclass(frozen=True, slots=True)
class CacheContext:
    num_blocks: int
    max_model_len: int
    num_swap_blocks: int = 0  # of host memory; 0: nothing is swapped
    # Of each group of layers with tables of its own: tokens that a token sees, itself included; None: all before it, as in
    # the first group. More than one only for a cache that provides `window_groups`.
    windows: tuple[int | None, ...] = (None,)
    max_step_tokens: int = 0  # most tokens of one request in a step; 0: max_model_len


Direction = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class KVCopy:
    """Whole blocks, over all layers: device block k to host block k ("out"), or back ("in"). No block is written twice."""

    direction: Direction
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class KVCache(Protocol):
    """Config group `cache`. All counts are in blocks of `block_size` tokens. Called from the engine loop only.

    A cache changes `block_table`, `group_tables` and `block_hashes` of a request, and nothing else. When it raises, or gives
    a block that it has given already, the engine makes a new one, empty, for the same blocks: all requests are computed again.

    A cache that provides `window_groups` may be told of several groups of layers (`CacheContext.windows`). `block_table` is
    that of the first group, whose layers see all positions. The others have `group_tables`, over blocks of the same pool: each
    table begins where the window does, and grows step by step (`slide`). `num_needed`, `num_missing` and `num_free_blocks`
    count the blocks of all groups, those included that a running request will come to need.

    Example::

        from core.cache.kv_cache import CacheContext
        from core.cache.paged import PagedCache
        from core.request import Request
        from pydantic import Field


        class LongPrefixes(PagedCache):  # its blocks and books
            class Settings(PagedCache.Settings):
                min_prompt_tokens: int = Field(default=0, ge=0, description="shorter prompts are not shared")

            def __init__(self, settings: Settings, context: CacheContext):
                super().__init__(settings, context)
                self._min = settings.min_prompt_tokens

            def lookup(self, request: Request) -> int:
                return super().lookup(request) if request.num_prompt_tokens >= self._min else 0

            def commit(self, request: Request, num_tokens: int | None = None) -> None:
                if request.num_prompt_tokens >= self._min:
                    super().commit(request, num_tokens)
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now; a cached block that may be evicted counts as free."""
        ...

    def lookup(self, request: Request) -> int:
        """Start a waiting request on the longest cached prefix: takes its blocks into `block_table` (ref counted) and
        returns the tokens found, a multiple of block_size and at most num_tokens - 1 (at least one is computed).

        Needs an empty block_table. Whether a request uses the cache at all (prompt_logprobs does not) is decided here.
        """
        ...

    def peek(self, request: Request) -> int:
        """Tokens that `lookup` would find now; nothing is taken, and nothing counts as used. Asked for waiting requests.

        Optional (API 1.2): of a cache without it, a prefix is looked up and given back.
        """
        ...

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extend `block_table` to hold `num_tokens` positions in all. False, with nothing changed, when blocks lack."""
        ...

    def slide(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end), for which `allocate` has said yes, are computed in the step in hand. For each group after the
        first, give back the blocks that no position from `start` on sees, and take those for positions up to `end`.

        Called by the engine for each part of a plan, in which `start` never goes back; it may be left out while the tables
        reach `end`. Optional (API 1.2): only of a cache that provides `window_groups`, and only where there are several groups.
        """
        ...

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` takes at most. Optional (API 1.2), as is `num_missing`: without them, it is one
        block for every block_size tokens."""
        ...

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that lack for `allocate` to say yes to `num_tokens`; 0 or less when it would."""
        ...

    def num_freed_by(self, requests: Sequence[Request]) -> int:
        """Blocks that become free when all of `requests` are freed: those that nobody else holds."""
        ...

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        """KV of positions [0, num_tokens) with known ids is written: full blocks may now be shared.

        None means num_computed_tokens; with overlap that also counts a step in flight, so the scheduler says how far.
        """
        ...

    def free(self, request: Request, discard: bool = False) -> None:
        """Give all blocks back, host blocks too, and clear `block_table`. Cached ones stay findable until evicted. Idempotent.

        `discard`: the request has failed, and what it wrote may be wrong: no block that `allocate` gave it may be found again.
        """
        ...

    def reset(self) -> bool:
        """Forget cached prefixes. Whoever holds blocks keeps them; nothing of them is found again, not even what is written
        from now on.

        A cache may refuse (False, with nothing changed) while a request holds blocks, as those of API 1.1 do.
        """
        ...

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (invariants of the pool). Cheap; run when idle and in tests."""
        ...

    # Host memory: optional (API 1.2), all or none of it, with the word `swap`. Without it preempted requests are computed again.

    @property
    def num_swap_blocks(self) -> int:
        """Host blocks, as `CacheContext` has it."""
        ...

    @property
    def num_free_swap_blocks(self) -> int:
        """Of these, blocks that nobody needs: all of them while no request is swapped."""
        ...

    def swap_out(self, request: Request, num_tokens: int) -> int:
        """Keep KV of positions [0, num_tokens) in host memory, the longest head that finds room, and give all device blocks
        back. Returns the tokens kept; 0: nothing is, as after `free`.

        `num_tokens` are written, or will be by a step in flight: copies are made after it. Content that others use too, or
        that is in host memory already, is not copied.
        """
        ...

    def num_swapped_tokens(self, request: Request) -> int:
        """Tokens that `swap_in` would bring back at least, at most num_tokens - 1; 0 for a request that is not swapped."""
        ...

    def swap_in(self, request: Request) -> int | None:
        """Like `lookup`, for a swapped request: takes device blocks into `block_table`, for copies of what is kept. Returns the
        tokens restored, at most num_tokens - 1; None, with nothing changed, when device blocks lack.

        Blocks that others may read end at or before the tokens restored: the block after them is the request's own. Its host
        blocks are given back; so a scheduler asks first for all else that the request needs.
        """
        ...

    def take_copies(self) -> Sequence[KVCopy]:
        """What is to be copied, in order, before the next forward pass. The engine takes it after each `schedule`."""
        ...
