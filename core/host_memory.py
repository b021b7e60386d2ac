"""Host memory for the KV of preempted requests: how much there is, and what using it costs. Measured at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from core.batch import ScheduledRequest, SchedulerOutput
from core.batching import BatchBuilder
from core.cache.kv_cache import CacheSettings
from core.errors import ConfigError, NonetError, PluginError, Terminated, described, shown
from core.memory import free_host_memory
from core.model.interface import Executor
from core.request import Request, SamplingParams
from core.scheduling.swap_cost import SwapCost

MEASURED_TOKENS = 256
MEASURED_ID = "swap-cost"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`cost` is there when `num_blocks` are: KV blocks over all layers."""

    num_blocks: int = 0
    cost: SwapCost | None = None


def host_memory(
    executor: Executor, settings: CacheSettings, *, who: str, num_kv_blocks: int, max_tokens: int, vocab_size: int
) -> HostMemory:
    """Allocates it. `executor` has its KV pool of `num_kv_blocks` already, and nothing is in it; `who` names it in messages, and
    a request has `max_tokens` in a step at most.

    Raises ConfigError for memory that is not there, PluginError for an executor that cannot swap after all.
    """
    if not settings.swaps:
        return HostMemory()
    num_measured = min(MEASURED_TOKENS, max_tokens, num_kv_blocks * settings.block_size)
    try:
        num_blocks = settings.num_swap_blocks or _num_that_fit(executor, settings, num_kv_blocks)
        executor.allocate_swap(num_blocks, settings.swap_checksums)
        copy_s = executor.measure_swap()
        prefill_s = _prefill_s(executor, settings.block_size, num_measured, vocab_size)
    except (NonetError, Terminated, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{who} cannot swap KV: {described(error)}; set cache.swap_memory=0") from error
    if type(copy_s) is not float or not 0 <= copy_s < float("inf"):
        raise PluginError(f"{who}: measure_swap returned {shown(copy_s)}, which are no seconds")
    return HostMemory(num_blocks, SwapCost(copy_s, prefill_s))


def _num_that_fit(executor: Executor, settings: CacheSettings, num_kv_blocks: int) -> int:
    block_bytes, free = executor.kv_bytes_per_block(), free_host_memory()
    if free is not None and executor.device == "cpu":
        free = max(free - num_kv_blocks * block_bytes, 0)  # the KV pool lies there too, and is not touched yet
    budget = settings.swap_memory_bytes(free)
    if budget < block_bytes:
        raise ConfigError(
            f"cache.swap_memory={settings.swap_memory} ({budget} bytes) does not hold one KV block of {block_bytes} "
            "bytes; raise cache.swap_memory, or set it to 0"
        )
    return budget // block_bytes


def _prefill_s(executor: Executor, block_size: int, num_tokens: int, vocab_size: int) -> float:
    """Seconds per token of a prompt, of the second of two forward passes."""
    batch = BatchBuilder(block_size, num_tokens).build(_prompt(num_tokens, block_size, vocab_size))

    def step() -> None:
        executor.submit(batch).result()

    step()
    seconds = _seconds(step)
    executor.forget([MEASURED_ID])
    return seconds / num_tokens


def _prompt(num_tokens: int, block_size: int, vocab_size: int) -> SchedulerOutput:
    """A prompt but for its last token, so that nothing is sampled, in the first blocks of the pool."""
    ids = [index % vocab_size for index in range(num_tokens + 1)]
    request = Request(MEASURED_ID, ids, SamplingParams())
    request.block_table = list(range(-(-num_tokens // block_size)))
    return SchedulerOutput(0, (ScheduledRequest(request, 0, num_tokens, samples=False),))


def _seconds(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
