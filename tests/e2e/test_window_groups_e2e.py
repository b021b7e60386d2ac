"""Gemma 3 with its sliding layers in groups: the same results as with all KV kept, in a fraction of the memory."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.batch import ModelBatch
from core.model.runner import ModelRunner
from core.model.spec import ModelFiles
from core.session import open_session
from core.stages.frontend import GenerateRequest
from core.testing.harness.pipelines import Answered, RunningPipeline, call, running, running_session
from core.testing.tiny_models import make_tiny_model

WINDOW = 40
CONFIG = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 12,
    "_sliding_window_pattern": 6,
    "hidden_size": 32,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}
KEPT = "cache.window_groups=false"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two full layers and ten with a window of 40 tokens: six groups of two."""
    return make_tiny_model(tmp_path_factory.mktemp("gemma3") / "model", "gemma3_text", **CONFIG)


def overrides(folder: Path, *more: str) -> tuple[str, ...]:
    fixed = ("model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=120")
    chunks = () if "prefill=whole" in more else ("prefill.chunk_size=32",)
    return (f"model.source={folder}", *fixed, *chunks, *more)


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(6, 330), k=count)


def workload() -> list[GenerateRequest]:
    """Prompts of 5 to 500 tokens, those of every second one with the same 100 at the head; and short ones that grow together."""
    lengths = (300, 5, 40, 130, 400, 61, 200, 101)
    head = ids(100, 0)
    prompts = [(head if index % 2 else []) + ids(length, index) for index, length in enumerate(lengths, start=1)]
    calls = [call(f"r{index}", prompt, 12, logprobs=1) for index, prompt in enumerate(prompts)]
    return calls + [call(f"s{index}", ids(20, 50 + index), 50, logprobs=1) for index in range(6)]


def poisoned(pipeline: RunningPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step, what no request holds and nobody can find again becomes NaN."""
    forward = ModelRunner.forward

    @torch.inference_mode()
    def run(runner: ModelRunner, batch: ModelBatch) -> torch.Tensor:
        pool = pipeline.engine._pipeline.cache._cache._pool  # type: ignore[attr-defined]
        blank = [b for b in range(pool.num_blocks) if not pool.ref_count(b) and pool.node(b) is None]
        for tensor in runner._kv_tensors:
            tensor[blank] = float("nan")
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", run)


def results(answers: list[Answered]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def assert_close(got: list[Answered], expected: list[Answered]) -> None:
    assert results(got) == results(expected)
    for one, other in zip(got, expected, strict=True):
        mine, theirs = ([row.logprob for row in answer.choices[0].logprobs] for answer in (one, other))
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-3, rtol=1e-3)


@pytest.fixture
async def kept(tiny: Path) -> list[Answered]:
    """The slow twin: all layers in one group, one call at a time, prompts whole, nothing found."""
    async with running(*overrides(tiny, KEPT, "prefill=whole", "cache.enable_prefix_caching=false")) as pipeline:
        assert pipeline.engine._pipeline.layout.windows == (None,)
        return await pipeline.answer_each(workload())


@asynccontextmanager
async def grouped(folder: Path, *more: str) -> AsyncIterator[RunningPipeline]:
    async with running(*overrides(folder, *more)) as pipeline:
        assert pipeline.engine._pipeline.layout.windows == (None, *[WINDOW] * 5)
        yield pipeline


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("prefill=whole", "scheduler.max_num_scheduled_tokens=600"),
        ("prefill.chunk_size=7",),
        ("cache.block_size=64",),
        ("cache.num_blocks=17",),  # half of what the longest sequence takes where all KV is kept
        ("cache.num_blocks=17", "cache.enable_prefix_caching=false", "prefill.chunk_size=100"),
        ("model=transformers",),
    ],
    ids=["batched", "whole", "chunks of 7", "blocks of 64", "preempted", "computed again", "transformers"],
)
async def test_the_result_is_that_of_all_kv_kept(
    more: tuple[str, ...], tiny: Path, kept: list[Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = workload()
    async with grouped(tiny, *more) as pipeline:
        poisoned(pipeline, monkeypatch)
        assert_close(await pipeline.answer_all(calls), kept)
        again = await pipeline.answer_all(calls)
        assert_close(again, kept)
        if "cache.num_blocks=17" in more:
            assert sum(step.num_preemptions for step in pipeline.steps) > 0
        elif "cache.enable_prefix_caching=false" not in more:
            assert sum(answer.usage.cached_tokens for answer in again) > 500


async def num_held(folder: Path, *more: str) -> float:
    """Most bytes of KV that one call of 512 tokens holds, once its prompt is through."""
    async with running(*overrides(folder, "prefill.chunk_size=64", *more)) as pipeline:
        await pipeline.answer(call("a", ids(480, 1), 32))
        decodes = [step for step in pipeline.steps if not step.num_prefill_tokens][:-1]
        block_bytes = pipeline.engine._pipeline.executor.kv_bytes_per_block()
        return max(step.kv_blocks_total - step.kv_blocks_free for step in decodes) * block_bytes


async def test_a_long_sequence_holds_a_window_of_its_sliding_layers(tiny: Path) -> None:
    """32 blocks of 12 layers; or 32 of 2 layers and at most 5 of each 2 of the other 10."""
    layer_bytes = 2 * 16 * 2 * 16 * 4  # of a block: keys and values, tokens, heads, head_dim, float32
    assert await num_held(tiny, KEPT) == 32 * 12 * layer_bytes
    assert await num_held(tiny) <= (32 * 2 + 5 * 10) * layer_bytes


async def test_memory_of_the_pool_is_what_config_says(tiny: Path) -> None:
    """The same bytes in more and smaller blocks; and longer sequences fit."""
    sizes, slots = [], []
    for more in ((), (KEPT,)):
        async with running(*overrides(tiny, "cache.num_blocks=20", *more)) as pipeline:
            executor = pipeline.engine._pipeline.executor
            sizes.append(pipeline.client.info.num_kv_blocks * executor.kv_bytes_per_block())
            slots.append(pipeline.client.info.num_kv_slots)
    assert sizes[0] == sizes[1]
    assert slots[1] == 20 * 16 and slots[0] > 4 * slots[1]


@pytest.mark.parametrize("more", [("cache.num_swap_blocks=8",), (KEPT,)])
async def test_without_groups_where_config_says_so(more: tuple[str, ...], tiny: Path) -> None:
    async with running(*overrides(tiny, *more)) as pipeline:
        assert pipeline.engine._pipeline.layout.windows == (None,)
        assert pipeline.engine._pipeline.executor.windows == (None,)  # type: ignore[attr-defined]
        await pipeline.answer(call("a", ids(100, 1), 4))


async def test_a_part_that_does_not_agree_keeps_all_kv(tiny: Path) -> None:
    session = open_session(["process.separate=false", *overrides(tiny)])
    part = session.description.part("model")
    assert "window_groups" in part.provided.component.provides
    object.__setattr__(part.provided.component, "provides", ())
    try:
        async with running_session(session) as pipeline:
            assert pipeline.engine._pipeline.layout.windows == (None,)
    finally:
        object.__setattr__(part.provided.component, "provides", ("window_groups",))


async def test_models_without_sliding_layers_are_as_they_were(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "llama", "llama")
    async with running(*overrides(folder, "cache.num_blocks=40")) as pipeline:
        assert pipeline.client.info.num_kv_blocks == 40 and pipeline.client.info.num_kv_slots == 640
        await pipeline.answer(call("a", ids(30, 1), 4))


@pytest.mark.model
@pytest.mark.slow
async def test_gemma3_270m_past_its_window_of_512(gemma3: ModelFiles) -> None:
    """A prompt of 1100 tokens in chunks, found again, and computed beside others in a pool that preempts."""
    text: Callable[[int], str] = lambda count: "The lighthouse keeper wrote down the weather every morning. " * count
    calls: list[Any] = [call(f"r{index}", text(count), 12, logprobs=1) for index, count in enumerate((110, 4, 70))]
    fixed = (f"model.source={gemma3.path}", "model.dtype=float32", "model.max_model_len=2048", "admission=open")
    async with running(*fixed, KEPT, "cache.num_blocks=160", "cache.enable_prefix_caching=false") as pipeline:
        expected = await pipeline.answer_each(calls)
        assert max(len(answer.prompt_token_ids) for answer in expected) > 1000
    async with running(*fixed, "cache.num_blocks=80") as pipeline:
        assert pipeline.engine._pipeline.layout.windows == (None, *[512] * 5)
        assert_close(await pipeline.answer_all(calls), expected)
        again = await pipeline.answer_all(calls)
        assert_close(again, expected)
        assert sum(answer.usage.cached_tokens for answer in again) > 500
