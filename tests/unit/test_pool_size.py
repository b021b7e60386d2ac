"""How many KV blocks assembly asks an executor for."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from core.assembly import _allocate
from core.cache.kv_cache import CacheSettings
from core.errors import ConfigError
from core.testing.harness.fake_executors import FakeExecutor

MIB = 1 << 20


@dataclass(slots=True)
class Sized(FakeExecutor):
    """A device with `free` bytes; a block takes one MiB."""

    free: int | None = None
    allocated: list[int] = field(default_factory=list)

    def free_memory(self) -> int | None:
        return self.free

    def kv_bytes_per_block(self) -> int:
        return MIB

    def allocate(self, num_blocks: int) -> None:
        self.allocated.append(num_blocks)


def blocks(free: int | None, max_model_len: int = 1 << 20, max_running: int = 64, **cache: Any) -> int:
    executor = Sized(free=free)
    spec: Any = SimpleNamespace(max_model_len=max_model_len)
    count = _allocate(CacheSettings(**cache), executor, spec, max_running)
    assert executor.allocated == [count]
    return count


def test_a_fraction_is_of_what_is_free_on_the_executors_device() -> None:
    assert blocks(200 * MIB, memory=0.5) == 100
    assert blocks(1000 * MIB) == 150  # the default share


def test_a_size_needs_no_knowledge_of_the_device() -> None:
    assert blocks(None, memory="64MiB") == 64


def test_a_fraction_of_the_unknown_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"cache.memory=0.15 .* cache.memory=2GiB, or cache.num_blocks"):
        blocks(None)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert blocks(0, num_blocks=7) == 7


def test_never_more_than_all_sequences_could_use() -> None:
    assert blocks(1000 * MIB, memory=1.0, max_model_len=100, max_running=3) == 3 * 7  # 16 tokens per block


def test_less_than_a_block_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"does not hold one KV block of 1048576 bytes; raise cache.memory"):
        blocks(MIB)
