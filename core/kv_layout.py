"""How KV memory is laid out: groups of layers with block tables of their own, and what a sequence takes. At start only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.cache.kv_cache import CacheSettings
from core.cache.window_groups import longest_request, num_blocks_needed
from core.errors import PluginError, shown

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.pipeline import Part, PipelineDescription

log = logging.getLogger("nonet.engine")

PARTIES = ("cache", "executor", "model", "attention")
"""Groups whose components must all provide `window_groups`."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    windows: tuple[int | None, ...] = (None,)  # of each group of layers, as in `core.cache.kv_cache.CacheContext`
    max_step_tokens: int = 0  # most tokens of one request in a step
    block_size: int = 16

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that a sequence takes at most, over all groups."""
        return num_blocks_needed(num_tokens, self.block_size, self.windows, self.max_step_tokens)

    def num_tokens(self, num_blocks: int) -> int:
        """Of the longest sequence that so many blocks hold."""
        return longest_request(num_blocks, self.block_size, self.num_needed)


def wants_groups(description: PipelineDescription, pool: CacheSettings) -> bool:
    """Whether layers may be in groups: config does not say no, and all components agree."""
    return _would_group(description, pool) and not pool.swaps


def tell_of_kept_windows(description: PipelineDescription, pool: CacheSettings, spec: ModelSpec) -> None:
    """Swap memory costs a model with sliding windows the blocks that would leave them: said once, where it is so."""
    from core.model.file_facts import read_file_facts

    if pool.swaps and _would_group(description, pool) and True in read_file_facts(spec).values["sliding_window"]:
        log.info(
            "KV that leaves a sliding window is kept: cache.swap_memory or cache.num_swap_blocks is set, and the two do not "
            "go together; set it to 0 to have more room on the device"
        )


def _would_group(description: PipelineDescription, pool: CacheSettings) -> bool:
    return pool.window_groups and all(_agrees(description.part(group)) for group in PARTIES)


def _agrees(part: Part) -> bool:
    return "window_groups" in part.provided.component.provides


def read_layout(executor: Any, who: str, wanted: bool, pool: CacheSettings, max_step: Callable[[], int]) -> KVLayout:
    """Of an executor whose model is loaded; `max_step`: the most tokens of one request in a step.

    Raises PluginError for windows that are none.
    """
    windows = executor.windows if wanted else (None,)
    if len(windows) == 1:
        return KVLayout(block_size=pool.block_size)
    if windows[0] is not None or not all(type(window) is int and window > 0 for window in windows[1:]):
        raise PluginError(f"{who}: its windows are {shown(windows)}; they must be None, then the tokens of each window")
    log.info("KV cache: %d groups of layers, windows %s", len(windows), sorted(set(windows[1:])))
    return KVLayout(tuple(windows), max_step(), pool.block_size)


def largest_step(prefill: object, max_model_len: int, max_tokens: int) -> int:
    """`max_tokens` is what a step holds; a prefill that says less is believed (`core.stages.prefill.ChunkBound`)."""
    ask = getattr(prefill, "largest_chunk", None)
    largest = ask(max_model_len) if callable(ask) else None
    return min(largest, max_tokens) if type(largest) is int and largest > 0 else max_tokens
