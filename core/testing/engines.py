"""A whole engine with real stages and no model: what a test of one stage plugs its own part into."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from core.blueprint import Blueprint
from core.cache.kv_cache import CacheContext, KVCache
from core.cache.paged import PagedCache
from core.engine import Engine
from core.isolation.faults import Faults
from core.kv_layout import KVLayout
from core.model.interface import Executor
from core.model.spec import ModelFiles, ModelSpec
from core.request import EngineRequest, SamplingParams
from core.scheduling.swap_cost import SwapCost
from core.stages.completion import Completion, CompletionContext, Standard
from core.stages.decode import Decode, DecodeContext, Plain
from core.stages.predictor import MaxTokens, Predictor, PredictorContext
from core.stages.prefill import Chunked, Prefill, PrefillContext
from core.stages.scheduler import Scheduler, SchedulerContext, SchedulerSettings
from core.testing.fakes import EOS_TOKEN_ID, VOCAB_SIZE
from core.wire import EngineInfo

MAX_MODEL_LEN = 1024


def fake_spec(vocab_size: int = VOCAB_SIZE, max_model_len: int = MAX_MODEL_LEN) -> ModelSpec:
    return ModelSpec(
        name="fake",
        files=ModelFiles("hf", Path("nowhere"), "nowhere"),
        config={"model_type": "fake"},
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
    )


def paged_cache(num_blocks: int = 64, num_swap_blocks: int = 0, **settings: object) -> KVCache:
    context = CacheContext(num_blocks, MAX_MODEL_LEN, num_swap_blocks)
    return PagedCache(PagedCache.Settings.model_validate(settings), context)


def scheduler_context(
    cache: KVCache, chunk_size: int = 64, budget: int = 256, decode: Decode | None = None
) -> SchedulerContext:
    return SchedulerContext(
        cache=cache,
        prefill=Chunked(Chunked.Settings(chunk_size=chunk_size), PrefillContext(budget)),
        decode=decode or Plain(Plain.Settings(), DecodeContext(MAX_MODEL_LEN)),
        clock=time.monotonic,
        max_model_len=MAX_MODEL_LEN,
        predictor=MaxTokens(MaxTokens.Settings(), PredictorContext(MAX_MODEL_LEN)),
    )


def make_engine(
    scheduler: Callable[[Any, SchedulerContext], Scheduler],
    settings: SchedulerSettings,
    executor: Executor,
    *,
    spec: ModelSpec | None = None,
    num_blocks: int = 64,
    num_swap_blocks: int = 0,
    chunk_size: int = 64,
    budget: int = 256,
    cache: Callable[[], KVCache] | None = None,
    prefill: Callable[[], Prefill] | None = None,
    decode: Callable[[], Decode] | None = None,
    completion: Completion | None = None,
    predictor: Predictor | None = None,
    faults: Faults | None = None,
    layout: KVLayout | None = None,
) -> Engine:
    """An engine around `scheduler(settings, context)`; what is not given is built in. The numbers of blocks: also of a cache
    given. Swapping is worth it always.
    """
    spec, faults = spec or fake_spec(), faults or Faults()
    chunked = Chunked.Settings(chunk_size=chunk_size)
    executor.allocate(num_blocks)
    if num_swap_blocks:
        executor.allocate_swap(num_swap_blocks, checksums=True)
    blueprint = Blueprint(
        model=spec,
        executor=executor,
        completion=completion or Standard(Standard.Settings(), CompletionContext(spec)),
        predictor=predictor or MaxTokens(MaxTokens.Settings(), PredictorContext(spec.max_model_len)),
        make_cache=cache or partial(paged_cache, num_blocks, num_swap_blocks),
        make_prefill=prefill or partial(Chunked, chunked, PrefillContext(budget)),
        make_decode=decode or partial(Plain, Plain.Settings(), DecodeContext(MAX_MODEL_LEN)),
        make_scheduler=partial(scheduler, settings),
        step_limits=settings,
        clock=faults.clock,
        num_swap_blocks=num_swap_blocks,
        swap_cost=SwapCost(0.0, 1.0) if num_swap_blocks else None,
        layout=layout or KVLayout(),
    )
    pipeline = blueprint.build(faults)
    info = EngineInfo(
        model_name=spec.name,
        max_model_len=spec.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=pipeline.cache.block_size,
        dtype="float32",
        device="cpu",
    )
    return Engine(pipeline, info)


def engine_request(request_id: str, prompt: list[int], max_tokens: int = 8, **params: object) -> EngineRequest:
    values: dict[str, object] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, **params}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**values),  # type: ignore[arg-type]
        seed=0,
        arrival_time=time.monotonic(),
    )
