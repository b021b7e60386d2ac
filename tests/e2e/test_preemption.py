"""Preemption changes no answer: by recompute and by swap, when KV lacks (F50) and when it is forced every few steps (F51).

The slow twin is each call run alone. `running` checks after each run that the pool is whole again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

from core.pipeline import Part, PipelineDescription
from core.request import GrammarSpec
from core.session import Session, open_session
from core.stages.frontend import GenerateRequest
from core.testing.forced_preemption import ForcedPreemption
from core.testing.harness.pipelines import Answered, RunningPipeline, call, running, running_session
from core.testing.tiny_models import make_tiny_model

FIRST_ID, VOCAB = 6, 330  # of the tiny model's tokenizer, special tokens left out
NUM_CALLS = 500
SCHEMA = '{"type": "array", "items": {"enum": ["first", "second", 7, true]}, "minItems": 1}'
AT_ONCE = 50  # calls that are sent together
SWAP = "cache.num_swap_blocks=64"
Mode = Literal["swap", "recompute"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("preemption") / "model", "llama")


def overrides(folder: Path, *more: str) -> list[str]:
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1", "process.separate=false")
    return [*fixed, *more]


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, VOCAB), k=count)


def forced_calls() -> list[GenerateRequest]:
    """Penalties, stop strings, n=3, seeds, masks, processors with state: whatever has a memory of the sequence."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    options: tuple[dict[str, Any], ...] = (
        {},
        {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.3},
        {**sampled, "top_p": 0.9},
        {**sampled, "n": 3},
        {"stop": (" a", "e", "1")},
        {**sampled, "frequency_penalty": 0.5, "top_k": 30},
        {"logit_bias": {9: 5.0, 40: -100.0}, "bad_words": ("the", "en")},
        {**sampled, "n": 3, "repetition_penalty": 1.2, "logprobs": 1},
        {"stop_token_ids": tuple(range(50, 60)), "min_tokens": 4},
        {**sampled, "allowed_token_ids": tuple(range(20, 200, 3))},
        {**sampled, "grammar": GrammarSpec(kind="regex", source="(no|yes), [a-f]{2,6} of [0-9]+"), "n": 3},
        {"grammar": GrammarSpec(kind="json_schema", source=SCHEMA), "frequency_penalty": 0.6, "stop": ("7",)},
    )
    shared = random_ids(36, seed=99)
    lengths = random.Random(5)
    calls = []
    for index in range(NUM_CALLS):
        own = random_ids(lengths.randint(1, 40), index)
        prompt = [*shared, *own] if index % 3 == 0 else own
        calls.append(call(f"r{index}", prompt, lengths.randint(4, 12), **options[index % len(options)]))
    return calls


@pytest.fixture(scope="module")
def forced_solo(folder: Path) -> list[Answered]:
    async def run() -> list[Answered]:
        async with running(*overrides(folder, "cache.num_blocks=64", "cache.enable_prefix_caching=false")) as pipeline:
            return await pipeline.answer_each(forced_calls())

    return asyncio.run(run())


def forced_session(folder: Path, every: int, mode: Mode) -> Session:
    session = open_session(overrides(folder, "cache.num_blocks=80", SWAP))
    part = session.description.part("scheduler")
    values = part.settings.model_dump(exclude={"preemption"})
    settings = ForcedPreemption.Settings(preempt_every=every, preemption=mode, **values)
    component = replace(part.provided.component, target="core.testing.forced_preemption:ForcedPreemption")
    forced = Part("scheduler", replace(part.provided, component=component), settings)
    parts = tuple(forced if other is part else other for other in session.description.parts)
    return replace(session, description=PipelineDescription(parts))


async def answered_in_turns(pipeline: RunningPipeline, calls: Sequence[GenerateRequest]) -> list[Answered]:
    answers: list[Answered] = []
    for start in range(0, len(calls), AT_ONCE):
        answers += await pipeline.answer_all(calls[start : start + AT_ONCE])
    return answers


def results(answers: Sequence[Answered]) -> list[list[tuple[Any, ...]]]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in answer.choices] for answer in answers]


def logprobs(answers: Sequence[Answered]) -> list[float]:
    return [row.logprob for answer in answers for choice in answer.choices for row in choice.logprobs]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("every", [1, 3, 7])
async def test_f51_forced_preemption_changes_nothing(
    every: int, mode: Mode, folder: Path, forced_solo: list[Answered]
) -> None:
    async with running_session(forced_session(folder, every, mode)) as pipeline:
        answers = await answered_in_turns(pipeline, forced_calls())
        assert results(answers) == results(forced_solo)
        assert logprobs(answers) == pytest.approx(logprobs(forced_solo), abs=1e-4)
        num_preempted = sum(step.num_preemptions for step in pipeline.steps)
        num_swapped_in = sum(step.num_swapped_in_blocks for step in pipeline.steps)
        assert num_preempted >= len(pipeline.steps) // every - AT_ONCE
        assert bool(num_swapped_in) is (mode == "swap")


F50_WAYS = list(product(("fcfs", "priority"), ("recompute", "swap"), (True, False), (True, False)))


def f50_calls(levels: int = 1) -> list[GenerateRequest]:
    """64 requests of 1 to 400 tokens, prompt and output; the pool of `F50_BLOCKS` holds 2.5 of the longest."""
    draw = random.Random(50)
    shared = random_ids(48, seed=50)
    calls = []
    for index in range(64):
        total = draw.randint(2, 400)
        num_output = min(draw.randint(1, 40), total - 1)
        own = random_ids(total - num_output, 1000 + index)
        prompt = [*shared, *own[48:]] if len(own) > 48 and index % 2 else own
        calls.append(replace(call(f"r{index}", prompt, num_output), priority=draw.randint(0, 2) % levels))
    return calls


F50_BLOCKS = "cache.num_blocks=63"


@pytest.fixture(scope="module")
def f50_solo(folder: Path) -> list[Answered]:
    async def run() -> list[Answered]:
        async with running(*overrides(folder, F50_BLOCKS, "cache.enable_prefix_caching=false")) as pipeline:
            return await pipeline.answer_each(f50_calls())

    return asyncio.run(run())


@pytest.mark.parametrize(("scheduler", "mode", "chunked", "cached"), F50_WAYS)
async def test_f50_kv_for_two_and_a_half_sequences(
    scheduler: str, mode: str, chunked: bool, cached: bool, folder: Path, f50_solo: list[Answered]
) -> None:
    way = overrides(
        folder,
        F50_BLOCKS,
        SWAP if mode == "swap" else "cache.num_swap_blocks=0",
        f"scheduler={scheduler}",
        f"scheduler.preemption={mode}",
        "prefill.chunk_size=32" if chunked else "prefill=whole",
        f"cache.enable_prefix_caching={str(cached).lower()}",
    )
    async with running(*way) as pipeline:
        answers = await pipeline.answer_all(f50_calls(levels=3 if scheduler == "priority" else 1))
        assert results(answers) == results(f50_solo)
        assert sum(step.num_preemptions for step in pipeline.steps) > 0
        if mode == "swap":
            assert sum(step.num_swapped_out_blocks for step in pipeline.steps) > 0


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
async def test_f55_a_pool_of_exactly_one_request(
    num_blocks: int, block_size: int, folder: Path, make_call: Callable[[int], GenerateRequest]
) -> None:
    """Two requests that fill the pool each, one after the other, and never a step that spins."""
    slots = num_blocks * block_size
    calls = [make_call(slots), make_call(slots)]
    async with running(*overrides(folder, f"cache.num_blocks={num_blocks}", f"cache.block_size={block_size}")) as pipe:
        answers = await pipe.answer_all(calls)
        assert [len(answer.token_ids) for answer in answers] == [4, 4]
        assert len(pipe.steps) <= 2 * (4 + slots // 512 + 1)


@pytest.fixture
def make_call() -> Callable[[int], GenerateRequest]:
    count = iter(range(100))
    return lambda slots: call(f"full{next(count)}", random_ids(slots - 4, slots), 4)
