"""The KV cache's bookkeeping as the scheduler sees it: which block ids hold which tokens. No tensor in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

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
    num_blocks: int | None = Field(default=None, ge=1, description="overrides `memory`")

    @field_validator("memory")
    @classmethod
    def _legal_memory(cls, memory: str | float) -> str | float:
        try:
            if _budget(memory, available=1 << 30) > 0:
                return memory
        except ValueError:
            pass
        raise ValueError("write a fraction in (0, 1], or a size such as 512MiB or 2GiB")

    def memory_bytes(self, available: int | None) -> int:
        """The budget in bytes, of `available` bytes that are free. Raises ConfigError for a fraction of the unknown."""
        if available is None and not str(self.memory).endswith(tuple(_UNITS)):
            raise ConfigError(
                f"cache.memory={self.memory} is a fraction of the free memory, and the executor does not know it; "
                "write a size such as cache.memory=2GiB, or cache.num_blocks"
            )
        return _budget(self.memory, available or 0)


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


class KVCache(Protocol):
    """Config group `cache`. All counts are in blocks of `block_size` tokens. Called from the engine loop only.

    A cache changes `block_table` and `block_hashes` of a request, and nothing else. When it raises, or gives a block that it
    has given already, the engine makes a new one, empty, for the same blocks: all requests are computed again.

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

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extend `block_table` to hold `num_tokens` positions in all. False, with nothing changed, when blocks lack."""
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
        """Give all blocks back and clear `block_table`. Cached ones stay findable until evicted. Idempotent.

        `discard`: the request has failed, and what it wrote may be wrong: no block that `allocate` gave it may be found again.
        """
        ...

    def reset(self) -> bool:
        """Forget cached prefixes. False, with nothing changed, while a request holds blocks."""
        ...

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (invariants of the pool). Cheap; run when idle and in tests."""
        ...
