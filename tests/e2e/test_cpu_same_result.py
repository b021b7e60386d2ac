"""The native CPU runtime gives each request the same answer, to the last bit, whatever is computed beside it: also in bfloat16
and with quantized weights, where other engines' answers depend on the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from core.stages.frontend import GenerateRequest
from core.testing.harness.pipelines import Answered, call, running
from core.testing.tiny_models import make_tiny_model

WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"head_dim": 48, "num_attention_heads": 3, "num_key_value_heads": 3},  # no multiple of 32 for a kv head
    "gemma3_text": {**WINDOW, "num_hidden_layers": 3, "_sliding_window_pattern": 3, "tie_word_embeddings": False},
}
NATIVE = ("model=cpu", "attention=cpu_paged", "model.weight_cache=false")
FORMATS: dict[str, tuple[str, ...]] = {
    "float32": ("model.dtype=float32", "quant=cpu_float32"),
    "bf16": ("model.dtype=bfloat16", "quant=cpu_bf16"),
    "int8": ("model.dtype=bfloat16", "quant=cpu_int8"),
    "int4": ("model.dtype=bfloat16", "quant=cpu_int4"),
    "gguf": ("model.dtype=bfloat16", "quant=cpu_gguf"),
}
INT8_KV = ("model.dtype=bfloat16", "quant=cpu_bf16", "attention.kv_format=int8")
SOLO = ("prefill=whole", "cache.enable_prefix_caching=false", "cache.window_groups=false", "executor.num_threads=1")
WAYS: dict[str, tuple[str, ...]] = {
    "batched": ("executor.num_threads=1",),
    "two threads": ("executor.num_threads=2",),
    "chunk 7": ("prefill.chunk_size=7", "scheduler.max_num_scheduled_tokens=40", "scheduler.max_num_running_reqs=16"),
    "blocks of 32": ("cache.block_size=32",),
    "preempted": ("cache.num_blocks=18", "prefill.chunk_size=7"),
}
SWAPPED = (*WAYS["preempted"], "cache.num_swap_blocks=40", "cache.swap_checksums=true", "scheduler.preemption=swap")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family) / "model", family, **FAMILIES[family])
        return made[family]

    return folder


def workload() -> list[GenerateRequest]:
    lengths = (3, 90, 17, 64, 31, 16, 5, 48, 33, 80, 9, 65)
    made = []
    for index, length in enumerate(lengths):
        ids = random.Random(index).choices(range(6, 330), k=length)
        params: dict[str, Any] = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
        made.append(call(f"r{index}", ids, 12, ignore_eos=True, logprobs=2, **params))
    return made


async def run(folder: Path, *overrides: str, solo: bool = False) -> list[Answered]:
    fixed = (f"model.source={folder}", "cache.num_blocks=256", *NATIVE)
    async with running(*fixed, *overrides) as pipeline:
        assert pipeline.engine._pipeline.executor is not None
        answers = await (pipeline.answer_each(workload()) if solo else pipeline.answer_all(workload()))
        await pipeline.assert_whole()
        if overrides[-len(SWAPPED) :] == SWAPPED:
            assert sum(step.num_swapped_in_blocks for step in pipeline.steps) > 0
    return answers


def told(answers: list[Answered]) -> list[Any]:
    return [[(c.token_ids, c.logprobs) for c in answer.choices] for answer in answers]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_the_same_to_the_last_bit(family: str, form: str, tiny: Callable[[str], Path]) -> None:
    await assert_same_in_all_ways(tiny(family), FORMATS[form])


async def test_answers_with_keys_and_values_in_int8_are_too(tiny: Callable[[str], Path]) -> None:
    await assert_same_in_all_ways(tiny("gemma3_text"), INT8_KV, {**WAYS, "swapped": SWAPPED})


async def assert_same_in_all_ways(
    folder: Path, form: tuple[str, ...], ways: Mapping[str, tuple[str, ...]] = WAYS
) -> None:
    alone = told(await run(folder, *SOLO, *form, solo=True))
    for way, overrides in ways.items():
        assert told(await run(folder, *form, *overrides)) == alone, way


@pytest.mark.parametrize("form", [FORMATS["bf16"], INT8_KV])
async def test_long_contexts_are_split_over_threads_with_the_same_result(
    form: tuple[str, ...], tiny: Callable[[str], Path]
) -> None:
    ids = random.Random(5).choices(range(6, 330), k=1500)
    answers = []
    for overrides in (("executor.num_threads=1",), ("executor.num_threads=2",), ("prefill.chunk_size=100",)):
        fixed = (f"model.source={tiny('llama')}", *NATIVE, *form, "cache.num_blocks=256")
        async with running(*fixed, *overrides) as pipeline:
            asked = [call("r", ids, 40, temperature=0.0, ignore_eos=True, logprobs=1)]
            answers.append(told(await pipeline.answer_all(asked)))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
async def test_steps_that_are_begun_ahead_change_no_answer(family: str, tiny: Callable[[str], Path]) -> None:
    """Requests of many lengths come and go, are preempted and swapped, and end where nobody could know it."""
    ways = [("cache.num_blocks=256",), WAYS["preempted"], SWAPPED, ("scheduler.max_num_running_reqs=2",)]
    asked = [
        call(
            f"r{index}",
            random.Random(index).choices(range(6, 330), k=length),
            40 + 7 * index,
            temperature=0.0,
            stop_token_ids=[7],
        )
        for index, length in enumerate((3, 64, 17, 30, 5, 48))
    ]
    fixed = (f"model.source={tiny(family)}", *NATIVE, *FORMATS["bf16"], "executor.num_threads=2")
    expected = None
    for overlap in (0, 64):
        for way in ways:
            async with running(*fixed, *way, f"model.overlap_requests={overlap}") as pipeline:
                found = [[c.token_ids for c in answer.choices] for answer in await pipeline.answer_all(list(asked))]
                await pipeline.assert_whole()
                ahead = pipeline.engine._pipeline.executor._runner.model._program.ahead
                if way is SWAPPED:
                    assert sum(step.num_swapped_in_blocks for step in pipeline.steps) > 0
            assert (ahead.begun > 20 and ahead.used > 10) if overlap else not ahead.begun, (overlap, way)
            expected = expected or found
            assert found == expected, (overlap, way)


async def test_a_pool_of_the_same_memory_holds_more_tokens_in_int8(tiny: Callable[[str], Path]) -> None:
    found = {}
    for form in (FORMATS["bf16"], INT8_KV):
        fixed = (f"model.source={tiny('qwen3')}", *NATIVE, *form, "cache.memory=400KiB")
        async with running(*fixed) as pipeline:
            assert pipeline.engine._pipeline.executor is not None
            assert len((await pipeline.answer_all([call("r", [6, 7, 8], 40, ignore_eos=True)]))[0].choices) == 1
            found[form] = (
                pipeline.engine._pipeline.executor.kv_bytes_per_block(),
                pipeline.engine._pipeline.cache.num_blocks,
            )
    layers, kv_heads, dim = 2, 3, 48
    assert found[FORMATS["bf16"]][0] == layers * kv_heads * 2 * 16 * dim * 2
    assert found[INT8_KV][0] == layers * kv_heads * (2 * 16 * dim + 128)
    assert all(num_blocks == 400 * 1024 // size for size, num_blocks in found.values())
    assert found[INT8_KV][1] > 1.8 * found[FORMATS["bf16"]][1]
