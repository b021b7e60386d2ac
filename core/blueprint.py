"""How an engine's pipeline is put together from its plugins: once at start, and again when its books cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.batching import BatchBuilder
from core.cache.kv_cache import KVCache
from core.isolation.cache import GuardedCache
from core.isolation.faults import Faults
from core.isolation.scheduler import GuardedScheduler
from core.isolation.stages import GuardedCompletion, GuardedDecode, GuardedPrefill
from core.model.interface import Executor
from core.model.spec import ModelSpec
from core.pipeline import EnginePipeline
from core.stages.completion import Completion
from core.stages.decode import Decode
from core.stages.prefill import Prefill
from core.stages.scheduler import Scheduler, SchedulerContext, SchedulerSettings


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The model with its KV memory, and how stages 4 to 6 and the cache, which keep books of it, are made.

    The functions may be called any number of times.
    """

    model: ModelSpec
    executor: Executor
    completion: Completion
    make_cache: Callable[[], KVCache]
    make_prefill: Callable[[], Prefill]
    make_decode: Callable[[], Decode]
    make_scheduler: Callable[[SchedulerContext], Scheduler]
    step_limits: SchedulerSettings
    clock: Callable[[], float]  # monotonic seconds

    def build(self, faults: Faults) -> EnginePipeline:
        """A pipeline with empty books, its plugins guarded. `faults` is told of what they do wrong."""
        cache = GuardedCache(self.make_cache(), faults)
        prefill = GuardedPrefill(self.make_prefill(), faults)
        decode = GuardedDecode(self.make_decode(), faults, self.model.vocab_size)
        context = SchedulerContext(cache, prefill, decode, self.clock, self.model.max_model_len)
        return EnginePipeline(
            model=self.model,
            scheduler=GuardedScheduler(
                self.make_scheduler(context), cache, self.step_limits, self.model.max_model_len, faults
            ),
            prefill=prefill,
            decode=decode,
            batch_builder=BatchBuilder(cache.block_size, self.model.max_model_len),
            executor=self.executor,
            completion=GuardedCompletion(self.completion, faults, self.model.max_model_len),
            cache=cache,
            clock=self.clock,
            faults=faults,
            rebuild=self.build,
        )
