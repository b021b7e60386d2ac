"""A whole engine with real stages and no model: what a test of one stage plugs its own part into."""

from __future__ import annotations

import time
from pathlib import Path

from core.batching import BatchBuilder
from core.cache.kv_cache import CacheContext, KVCache
from core.cache.paged import PagedCache
from core.engine import Engine
from core.model.interface import Executor
from core.model.spec import ModelFiles, ModelSpec
from core.pipeline import EnginePipeline
from core.request import EngineRequest, SamplingParams
from core.stages.completion import CompletionContext, Standard
from core.stages.decode import Decode, DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.stages.scheduler import Scheduler, SchedulerContext
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


def paged_cache(num_blocks: int = 64, **settings: object) -> KVCache:
    return PagedCache(PagedCache.Settings.model_validate(settings), CacheContext(num_blocks, MAX_MODEL_LEN))


def scheduler_context(
    cache: KVCache, chunk_size: int = 64, budget: int = 256, decode: Decode | None = None
) -> SchedulerContext:
    return SchedulerContext(
        cache=cache,
        prefill=Chunked(Chunked.Settings(chunk_size=chunk_size), PrefillContext(budget)),
        decode=decode or Plain(Plain.Settings(), DecodeContext(MAX_MODEL_LEN)),
        clock=time.monotonic,
        max_model_len=MAX_MODEL_LEN,
    )


def make_engine(
    scheduler: Scheduler, context: SchedulerContext, executor: Executor, spec: ModelSpec | None = None
) -> Engine:
    spec = spec or fake_spec()
    executor.allocate(context.cache.num_blocks)
    pipeline = EnginePipeline(
        model=spec,
        scheduler=scheduler,
        prefill=context.prefill,
        decode=context.decode,
        batch_builder=BatchBuilder(context.cache.block_size, MAX_MODEL_LEN),
        executor=executor,
        completion=Standard(Standard.Settings(), CompletionContext(spec)),
        cache=context.cache,
        clock=context.clock,
    )
    info = EngineInfo(
        model_name=spec.name,
        max_model_len=spec.max_model_len,
        num_kv_blocks=context.cache.num_blocks,
        block_size=context.cache.block_size,
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
