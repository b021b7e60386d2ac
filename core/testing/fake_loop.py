"""An engine loop of fakes around one stage under test: a scheduler, a prefill or a decode."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, cast

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.request import FinishReason, Request
from core.scheduling.policy import Policy, QueueSettings
from core.scheduling.queue_scheduler import QueueScheduler
from core.stages.decode import Decode, DecodeContext, Plain
from core.stages.predictor import MaxTokens, PredictorContext
from core.stages.prefill import Chunked, Prefill, PrefillContext, StepWatcher
from core.stages.scheduler import Scheduler, SchedulerContext
from core.testing.fakes import FakeClock, FakeEngine, Limits, assert_right_output, make_request

BLOCK_SIZE: Final = 16

MakeScheduler = Callable[[SchedulerContext, Limits], Scheduler]


def fcfs(settings: QueueSettings, context: SchedulerContext) -> Scheduler:
    """First come, first served."""
    return QueueScheduler(settings, context, Policy())


def queue_scheduler(context: SchedulerContext, limits: Limits) -> Scheduler:
    settings = QueueSettings(
        max_num_scheduled_tokens=limits.max_num_scheduled_tokens, max_num_running_reqs=limits.max_num_running_reqs
    )
    return fcfs(settings, context)


def fake_engine(
    num_blocks: int = 64,
    limits: Limits | None = None,
    *,
    scheduler: MakeScheduler = queue_scheduler,
    prefill: Prefill | None = None,
    decode: Decode | None = None,
    num_in_flight: int = 0,
    prefix_caching: bool = True,
    clock: FakeClock | None = None,
    num_swap_blocks: int = 0,
    windows: tuple[int | None, ...] = (None,),
) -> FakeEngine:
    limits = limits or Limits()
    settings = PagedCache.Settings(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching)
    longest_step = limits.max_num_scheduled_tokens
    cache = PagedCache(settings, CacheContext(num_blocks, limits.max_model_len, num_swap_blocks, windows, longest_step))
    prefill = prefill or Chunked(Chunked.Settings(chunk_size=24), PrefillContext(limits.max_num_scheduled_tokens))
    decode = decode or Plain(Plain.Settings(), DecodeContext(limits.max_model_len))
    clock = clock or FakeClock()
    predictor = MaxTokens(MaxTokens.Settings(), PredictorContext(limits.max_model_len))
    context = SchedulerContext(cache, prefill, decode, clock, limits.max_model_len, predictor=predictor)
    watcher = cast(StepWatcher, prefill) if hasattr(prefill, "step_finished") else None
    made = scheduler(context, limits)
    return FakeEngine(made, cache, limits, num_in_flight, clock=clock, windows=windows, watcher=watcher)


def random_requests(rng: random.Random, count: int, max_tokens: int = 40) -> list[Request]:
    """Prompts of 1 to 90 tokens, many with a common head."""
    head = [rng.randrange(50) for _ in range(48)]
    return [
        make_request(
            f"r{index}",
            head[: rng.choice([0, 16, 32, 48])] + [rng.randrange(50) for _ in range(rng.randint(1, 42))],
            rng.randint(1, max_tokens),
            seed=rng.randrange(5),
            tenant=rng.choice(["", "t"]),
        )
        for index in range(count)
    ]


def assert_complete(engine: FakeEngine, requests: Sequence[Request]) -> None:
    for request in requests:
        assert engine.ended[request.request_id] is request
        assert request.finish_reason is FinishReason.LENGTH
        assert_right_output(request)
