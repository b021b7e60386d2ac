"""However requests are run (alone, batched, in chunks, from the cache, preempted, streamed), the result is the same.

The slow twin of every case is the workload run solo: one call at a time, prompts whole, no prefix cache. `running`
checks after each run that the pool is whole again. On float32 ids are compared for equality: the workload has no ties
(see `test_the_workload_decides_nothing_by_a_tie`), so rounding that depends on batch shapes cannot show (bugs F6).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.batch import TokenLogprobs
from core.cache.paged import PagedCache
from core.cache.prefix import block_hash
from core.errors import RequestError
from core.model.spec import ModelFiles
from core.request import FinishReason
from core.stages.frontend import GenerateRequest
from core.testing.harness.pipelines import Answered, AnsweredChoice, RunningPipeline, call, running
from core.testing.tiny_models import make_tiny_model

FIRST_ID, VOCAB = 6, 330  # of the tiny models' tokenizer, special tokens left out
WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 16}  # shorter than most prompts and their chunks
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma2": {**WINDOW, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0},
    # untied: a random model with tied embeddings repeats its input
    "gemma3_text": {**WINDOW, "num_hidden_layers": 3, "_sliding_window_pattern": 3, "tie_word_embeddings": False},
}
SOLO = ("prefill=whole", "cache.enable_prefix_caching=false", "cache.window_groups=false")
SMALL_POOL = "cache.num_blocks=18"  # 2.5 of the longest sequences
WAYS: dict[str, tuple[str, ...]] = {
    "batched": (),
    "chunk 1": ("prefill.chunk_size=1",),
    "chunk 7": ("prefill.chunk_size=7", "scheduler.max_num_scheduled_tokens=40", "scheduler.max_num_running_reqs=16"),
    "chunk 64": ("prefill.chunk_size=64",),
    "whole": ("prefill=whole", "scheduler.max_num_scheduled_tokens=128"),
    "blocks of 32": ("cache.block_size=32",),
    "blocks of 64": ("cache.block_size=64", "cache.enable_prefix_caching=false"),
    "five at a time": ("scheduler.max_num_running_reqs=5",),
    "preempted": (SMALL_POOL,),
    "preempted in chunks": (SMALL_POOL, "prefill.chunk_size=7", "cache.enable_prefix_caching=false"),
    "swapped": (SMALL_POOL, "cache.num_swap_blocks=40", "cache.swap_checksums=true", "scheduler.preemption=swap"),
    "swapped in part": (
        SMALL_POOL,
        "cache.num_swap_blocks=5",
        "prefill.chunk_size=7",
        "cache.enable_prefix_caching=false",
        "scheduler.preemption=swap",
    ),
    "streamed by 5": ("detokenizer.stream_interval=5",),
    "transformers": ("model=transformers",),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model, made once per family."""
    made: dict[str, Path] = {}

    def folder(family: str, **config: Any) -> Path:
        key = family + "".join(f"-{name}{value}" for name, value in config.items())
        if key not in made:
            path = tmp_path_factory.mktemp(key) / "model"
            made[key] = make_tiny_model(path, family, **{**FAMILIES[family], **config})
        return made[key]

    return folder


def tiny_running(folder: Path, *overrides: str) -> Any:
    blocks = () if any("num_blocks" in override for override in overrides) else ("cache.num_blocks=256",)
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1")
    return running(*fixed, *blocks, *overrides)


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, VOCAB), k=count)


SHARED = random_ids(40, seed=99)  # two full blocks of 16 and a half


def workload() -> list[GenerateRequest]:
    """Sixteen calls that use every part of the sampler, prompts of 3 to 90 tokens; several share a prefix."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    penalised: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    lengths = (3, 90, 17, 64, 31, 16, 5, 48, 33, 80, 9, 65, 12, 70, 41, 24)
    options: tuple[dict[str, Any], ...] = (
        {},
        {},
        sampled,
        penalised,
        {**sampled, "top_p": 0.8, "min_p": 0.02},
        {**sampled, "n": 3},
        {"logprobs": 3},
        {"stop": (" a", "e", "1")},
        {**sampled, **penalised, "top_k": 20},
        {"logit_bias": {9: 5.0, 40: -100.0}, "bad_words": ("the", "en")},
        {"n": 3, **sampled, **penalised, "logprobs": 1},
        {},
        {"stop_token_ids": tuple(range(50, 60)), "min_tokens": 4},
        {**sampled, "temperature": 1.7, "allowed_token_ids": tuple(range(20, 200, 3))},
        {"ignore_eos": False},
        {"logprobs": 0, "prompt_logprobs": 2},
    )
    return [
        call(f"r{index}", _prompt(length, index), 24, **values)
        for index, (length, values) in enumerate(zip(lengths, options, strict=True))
    ]


def _prompt(length: int, index: int) -> list[int]:
    """Every second prompt that is long enough begins with `SHARED`."""
    if length > len(SHARED) and index % 2:
        return [*SHARED, *random_ids(length - len(SHARED), index)]
    return random_ids(length, index)


def assert_same(got: Sequence[Answered], expected: Sequence[Answered]) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert [_result(c) for c in one.choices] == [_result(c) for c in other.choices], f"call {index}"
        assert one.usage.completion_tokens == other.usage.completion_tokens
        for choice, twin in zip(one.choices, other.choices, strict=True):
            assert_close(choice.logprobs, twin.logprobs)
        assert_close(one.prompt_logprobs or (), other.prompt_logprobs or ())


def _result(choice: AnsweredChoice) -> tuple[Any, ...]:
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason


def assert_close(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Within 1e-4. Alternatives are compared by rank: two of equal logit may change places."""
    assert [row.token_id for row in got] == [row.token_id for row in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def num_preemptions(pipeline: RunningPipeline) -> int:
    return sum(step.num_preemptions for step in pipeline.steps)


@pytest.fixture(scope="module")
def solo(tiny: Callable[[str], Path]) -> Callable[[str], list[Answered]]:
    """The workload's results by family, each call with the engine to itself."""
    found: dict[str, list[Answered]] = {}

    async def run(family: str) -> list[Answered]:
        async with tiny_running(tiny(family), *SOLO) as pipeline:
            return await pipeline.answer_each(workload())

    def results(family: str) -> list[Answered]:
        if family not in found:
            found[family] = asyncio.run(run(family))
        return found[family]

    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_the_workload_is_worth_its_name(family: str, solo: Callable[[str], list[Answered]]) -> None:
    """Its answers differ from each other, and use every ending that it asks for."""
    answers = solo(family)
    choices = [choice for answer in answers for choice in answer.choices]
    assert len({tuple(choice.token_ids) for choice in choices}) == len(choices)
    assert sum(len(set(choice.token_ids)) >= 5 for choice in choices) > len(choices) / 2
    assert choices[0].finish_reason is FinishReason.LENGTH and len(choices[0].token_ids) == 24
    assert answers[15].prompt_logprobs is not None and len(answers[15].prompt_logprobs) == 23
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in answers[10].choices)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_workload_decides_nothing_by_a_tie(family: str, tiny: Callable[[str], Path]) -> None:
    greedy = [call(f"r{i}", c.prompt, 24, logprobs=2) for i, c in enumerate(workload())]
    async with tiny_running(tiny(family), *SOLO) as pipeline:
        answers = await pipeline.answer_each(greedy)
    margins = [row.top[0][1] - row.top[1][1] for answer in answers for row in answer.choices[0].logprobs]
    assert min(margins) > 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_same_result_as_solo(
    family: str, way: str, tiny: Callable[[str], Path], solo: Callable[[str], list[Answered]]
) -> None:
    expected = await asyncio.to_thread(solo, family)
    async with tiny_running(tiny(family), *WAYS[way]) as pipeline:
        answers = await pipeline.answer_all(workload())
        assert_same(answers, expected)
        assert max(step.num_requests for step in pipeline.steps) > 1
        if SMALL_POOL in WAYS[way]:
            assert num_preemptions(pipeline) > 0
        if way.startswith("swapped"):
            assert sum(step.num_swapped_in_blocks for step in pipeline.steps) > 0
        if way == "streamed by 5":
            assert answers[0].num_outputs <= 7


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_second_run_hits_the_prefix_cache_and_changes_nothing(
    family: str, tiny: Callable[[str], Path], solo: Callable[[str], list[Answered]]
) -> None:
    expected = await asyncio.to_thread(solo, family)
    async with tiny_running(tiny(family), "prefill.chunk_size=20") as pipeline:
        assert_same(await pipeline.answer_all(workload()), expected)
        again = await pipeline.answer_all(workload())
        assert_same(again, expected)
        for answer in again[:-1]:  # the last one wants prompt logprobs
            assert answer.usage.cached_tokens == (len(answer.prompt_token_ids) - 1) // 16 * 16
        assert again[-1].usage.cached_tokens == 0
        assert_same(await pipeline.answer_each(workload()), expected)


async def test_cancelled_neighbours_change_nothing(
    tiny: Callable[[str], Path], solo: Callable[[str], list[Answered]]
) -> None:
    expected = await asyncio.to_thread(solo, "llama")
    async with tiny_running(tiny("llama"), "cache.num_blocks=40", "prefill.chunk_size=16") as pipeline:
        noise = await pipeline.front.generate_many(
            [call(f"noise{i}", random_ids(60 + i, 1000 + i), 200) for i in range(6)]
        )
        running_calls = asyncio.ensure_future(pipeline.answer_all(workload()))
        for count, deltas in enumerate(noise):
            for _ in range(count):
                await anext(deltas)
            await deltas.aclose()
        assert_same(await running_calls, expected)


async def test_j1_preempted_requests_are_complete(tiny: Callable[[str], Path]) -> None:
    calls = [call(f"r{i}", random_ids(10 + i, i), 200) for i in range(8)]
    async with tiny_running(tiny("llama"), *SOLO) as pipeline:
        expected = await pipeline.answer_each(calls)
    async with tiny_running(tiny("llama"), "cache.num_blocks=34") as pipeline:
        answers = await pipeline.answer_all(calls)
        assert num_preemptions(pipeline) > 0
    assert all(len(answer.token_ids) == 200 for answer in answers)
    assert_same(answers, expected)


async def test_j4_a_pool_smaller_than_a_request(tiny: Callable[[str], Path]) -> None:
    async with tiny_running(tiny("llama"), "cache.num_blocks=8") as pipeline:
        with pytest.raises(RequestError, match="the KV cache holds 128") as caught:
            await pipeline.answer(call("large", random_ids(50, 0), 200))
        assert caught.value.param == "max_tokens"
        with pytest.raises(RequestError):
            await pipeline.answer(call("long", random_ids(200, 0), 1))
        answers = await pipeline.answer_all([call(f"r{i}", random_ids(50, i), 50) for i in range(2)])
        assert [len(answer.token_ids) for answer in answers] == [50, 50]
        assert len(pipeline.steps) < 250  # it never spins
        unlimited = call("rest", random_ids(100, 3), 1)
        object.__setattr__(unlimited, "max_tokens", None)
        assert len((await pipeline.answer(unlimited)).token_ids) == 28


@pytest.mark.parametrize("family", FAMILIES)
async def test_e6_prompt_logprobs_in_chunks(family: str, tiny: Callable[[str], Path]) -> None:
    """Every position's own values, with and without chunks, and what transformers says they are."""
    folder = tiny(family)
    prompts = [random_ids(count, count) for count in (96, 50, 33)]
    calls = [call(f"r{i}", prompt, 4, prompt_logprobs=5) for i, prompt in enumerate(prompts)]
    async with tiny_running(folder, *SOLO) as pipeline:
        whole = await pipeline.answer_each(calls)
    for overrides in (("prefill.chunk_size=32",), ("prefill.chunk_size=5", "cache.num_blocks=9")):
        async with tiny_running(folder, *overrides) as pipeline:
            assert_same(await pipeline.answer_all(calls), whole)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for prompt, answer in zip(prompts, whole, strict=True):
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert answer.prompt_logprobs is not None
        assert [row.token_id for row in answer.prompt_logprobs] == prompt[1:]
        for position, row in enumerate(answer.prompt_logprobs):
            assert row.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
            best = expected[position].topk(5).values.tolist()
            assert [value for _, value in row.top] == pytest.approx(best, abs=1e-4)


async def test_f5_penalties_see_nothing_of_batch_mates(tiny: Callable[[str], Path]) -> None:
    short = call("short", random_ids(4, 1), 40)
    long = call("long", random_ids(80, 2), 40, frequency_penalty=1.05, repetition_penalty=1.2)
    async with tiny_running(tiny("llama")) as pipeline:
        alone = await pipeline.answer_each([short, long])
        assert_same(await pipeline.answer_all([short, long]), alone)
        plain = await pipeline.answer(call("plain", random_ids(80, 2), 40))
        assert plain.token_ids != alone[1].token_ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_f6_lengths_3_to_200_batched_and_alone(family: str, tiny: Callable[[str], Path]) -> None:
    calls = [call(f"r{i}", random_ids(count, i), 32) for i, count in enumerate((3, 7, 15, 16, 33, 64, 120, 200))]
    async with tiny_running(tiny(family)) as pipeline:
        together = await pipeline.answer_all(calls)
        assert await pipeline.front.reset_prefix_cache()
        assert_same(together, await pipeline.answer_each(calls))


async def test_i5_a_cancelled_prompt_stays_in_the_cache(tiny: Callable[[str], Path]) -> None:
    prompt = random_ids(2000, 5)
    async with tiny_running(tiny("llama", max_position_embeddings=2304)) as pipeline:
        deltas = pipeline.front.generate(call("first", prompt, 200))
        await anext(deltas)
        await deltas.aclose()
        await pipeline.assert_whole()
        first = sum(step.num_prefill_tokens for step in pipeline.steps)
        answer = await pipeline.answer(call("second", prompt, 8))
        second = sum(step.num_prefill_tokens for step in pipeline.steps) - first
        assert (first, second) == (2000, 16)
        assert answer.usage.cached_tokens == 1984


async def test_k1_a_hash_of_eight_bits_gives_no_wrong_hit(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = random.Random(8)
    stems = [random_ids(16, 500 + i) for i in range(6)]
    prompts = [[*numbers.choice(stems), *numbers.choice(stems), *random_ids(16, i), 9] for i in range(300)]
    calls = [call(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)]
    batches = [calls[i:j] for i, j in pairwise(range(0, 301, 100))]
    async with tiny_running(tiny("llama"), "cache.enable_prefix_caching=false") as pipeline:
        expected = [await pipeline.answer_all(batch) for batch in batches]
    monkeypatch.setattr(PagedCache, "hash_block", staticmethod(lambda *content: block_hash(*content)[:1]))
    async with tiny_running(tiny("llama")) as pipeline:
        hits = 0
        for batch, wanted in zip(batches, expected, strict=True):
            answers = await pipeline.answer_all(batch)
            assert_same(answers, wanted)
            hits += sum(answer.usage.cached_tokens > 0 for answer in answers)
        assert hits > 100


async def test_k3_salt_and_tenant_part_the_cache(tiny: Callable[[str], Path]) -> None:
    prompt = random_ids(256, 4)

    async def cached(pipeline: RunningPipeline, key: str, tenant: str, salt: str) -> int:
        request = call(key, prompt, 2, cache_salt=salt)
        object.__setattr__(request, "tenant", tenant)
        return (await pipeline.answer(request)).usage.cached_tokens

    async with tiny_running(tiny("llama")) as pipeline:
        assert await cached(pipeline, "warm", "a", "x") == 0
        assert await cached(pipeline, "other salt", "a", "y") == 0
        assert await cached(pipeline, "other tenant", "b", "x") == 0
        assert await cached(pipeline, "no salt", "a", "") == 0
        assert await cached(pipeline, "same", "a", "x") == 240
        assert await cached(pipeline, "same of b", "b", "x") == 240


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
async def test_long_prompts_past_the_window_in_chunks(family: str, tiny: Callable[[str], Path]) -> None:
    """Chunk boundaries before, on and past the window of 16, and tiles of more than 256 queries."""
    calls = [call(f"r{i}", random_ids(count, i), 12) for i, count in enumerate((15, 16, 17, 300, 480))]
    async with tiny_running(tiny(family), *SOLO) as pipeline:
        expected = await pipeline.answer_each(calls)
    for chunk in (15, 16, 17, 100, 290):
        async with tiny_running(tiny(family), f"prefill.chunk_size={chunk}") as pipeline:
            assert_same(await pipeline.answer_all(calls), expected)


@pytest.mark.model
@pytest.mark.slow
async def test_real_model_gives_the_same_result(smollm2: ModelFiles) -> None:
    """Ties may fall either way (bugs F6): the first difference must be one."""
    calls = [call(f"r{i}", text, 24, logprobs=2) for i, text in enumerate(REAL_PROMPTS)]
    fixed = (f"model.source={smollm2.path}", "model.dtype=float32")
    async with running(*fixed, *SOLO, "cache.num_blocks=64") as pipeline:
        expected = await pipeline.answer_each(calls)
    async with running(*fixed, "cache.num_blocks=64", "prefill.chunk_size=7") as pipeline:
        assert_same_but_ties(await pipeline.answer_all(calls), expected)
        again = await pipeline.answer_all(calls)
        assert_same_but_ties(again, expected)
        assert sum(answer.usage.cached_tokens for answer in again) > 0
    async with running(*fixed, "cache.num_blocks=9") as pipeline:
        assert_same_but_ties(await pipeline.answer_all(calls), expected)
        assert num_preemptions(pipeline) > 0


REAL_PROMPTS = (
    "Paris",
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8, 13,",
    "The lighthouse keeper wrote down the weather every morning. " * 3,
    "Question: why is the sky blue?\nAnswer:",
    "First, oil the hinges. Second, trim the wick. Third, wind the clock. Fourth,",
)


def assert_same_but_ties(got: Sequence[Answered], expected: Sequence[Answered]) -> None:
    for one, other in zip(got, expected, strict=True):
        if one.token_ids != other.token_ids:
            places = zip(one.token_ids, other.token_ids, other.choices[0].logprobs, strict=True)
            row = next(row for ours, theirs, row in places if ours != theirs)
            assert row.top[0][1] - row.top[1][1] < 1e-4, (one.text, other.text)
