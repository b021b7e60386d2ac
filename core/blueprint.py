"""How an engine's pipeline is put together from its plugins: once at start, and again when its books cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core.batching import BatchBuilder
from core.cache.kv_cache import KVCache
from core.isolation.cache import GuardedCache
from core.isolation.faults import Faults
from core.isolation.predictor import GuardedPredictor
from core.isolation.scheduler import GuardedScheduler
from core.isolation.stages import GuardedCompletion, GuardedDecode, GuardedPrefill
from core.kv_layout import KVLayout
from core.model.interface import Executor
from core.model.spec import ModelSpec
from core.pipeline import EnginePipeline
from core.scheduling.swap_cost import SwapCost
from core.stages.completion import Completion
from core.stages.decode import Decode
from core.stages.predictor import Predictor
from core.stages.prefill import Prefill
from core.stages.scheduler import Scheduler, SchedulerContext, SchedulerSettings

MAX_SWAP_FAILURES = 3  # over the life of an engine; after them nothing is swapped any more


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The model with its KV memory, and how stages 4 to 6 and the cache, which keep books of it, are made.

    The functions may be called any number of times.
    """

    model: ModelSpec
    executor: Executor
    completion: Completion
    predictor: Predictor  # what it has learnt outlives the books
    make_cache: Callable[[], KVCache]
    make_prefill: Callable[[], Prefill]
    make_decode: Callable[[], Decode]
    make_scheduler: Callable[[SchedulerContext], Scheduler]
    step_limits: SchedulerSettings
    clock: Callable[[], float]  # monotonic seconds
    num_swap_blocks: int = 0  # of host memory, as the cache and the executor have them
    swap_cost: SwapCost | None = None
    layout: KVLayout = field(default_factory=KVLayout)  # as the cache and the executor have it

    def build(self, faults: Faults) -> EnginePipeline:
        """A pipeline with empty books, its plugins guarded. `faults` is told of what they do wrong."""
        swaps = faults.num_swap_failures < MAX_SWAP_FAILURES
        cache = GuardedCache(self.make_cache(), faults, self.num_swap_blocks if swaps else 0, self.layout.windows)
        prefill = GuardedPrefill(self.make_prefill(), faults)
        decode = GuardedDecode(self.make_decode(), faults, self.model.vocab_size)
        predictor = GuardedPredictor(self.predictor, faults, self.model.max_model_len)
        context = SchedulerContext(
            cache,
            prefill,
            decode,
            self.clock,
            self.model.max_model_len,
            self.swap_cost if cache.num_swap_blocks else None,
            predictor,
        )
        return EnginePipeline(
            model=self.model,
            scheduler=GuardedScheduler(
                self.make_scheduler(context), cache, self.step_limits, self.model.max_model_len, faults
            ),
            prefill=prefill,
            decode=decode,
            batch_builder=BatchBuilder(cache.block_size, self.model.max_model_len, len(self.layout.windows)),
            executor=self.executor,
            completion=GuardedCompletion(self.completion, faults, self.model.max_model_len),
            cache=cache,
            clock=self.clock,
            faults=faults,
            rebuild=self.build,
            layout=self.layout,
        )
