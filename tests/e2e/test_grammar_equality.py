"""A grammar gives the same answer however its tokens are made: forced at once or one by one, alone, batched or preempted.

The slow twin is `structured_outputs.jump_forward=false`: each token has a forward pass, with a mask of the forced one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from core.request import FinishReason, GrammarSpec
from core.stages.frontend import GenerateRequest
from core.testing.harness.pipelines import Answered, call, running
from core.testing.tiny_models import make_tiny_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9},
        "category": {"enum": ["one of the first", "one of the second", "another"]},
        "measurements": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        "description": {"type": "string", "maxLength": 8},
    },
    "required": ["identifier", "category", "measurements", "description"],
    "additionalProperties": False,
}
DATE = r"on [0-9]{4}-[01][0-9]-[0-3][0-9], at (noon|midnight) sharp"
CHOICES = ["the north wind", "the north sea", "a southern breeze"]
LIST = 'root ::= "<" item ("; " item)* ">"\nitem ::= "first" | "second" | [0-9]'
TAG = {
    "structures": [
        {"begin": "<call>", "schema": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}},
         "required": ["x"], "additionalProperties": False}, "end": "</call>"},
        {"begin": "<stop at=", "schema": {"type": "boolean"}, "end": ">"},
    ],
    "triggers": ["<call>", "<stop"], "at_least_one": True, "stop_after_first": True,
}  # fmt: skip
SPECS = (
    GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA), any_whitespace=False),
    GrammarSpec(kind="regex", source=DATE),
    GrammarSpec(kind="choice", source=json.dumps(CHOICES)),
    GrammarSpec(kind="ebnf", source=LIST),
)
MARKER = "o"  # soon in any text
OTHER_SPECS = (
    GrammarSpec(kind="structural_tag", source=json.dumps(TAG), any_whitespace=False),
    GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA), any_whitespace=False, after=MARKER),
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "n": 3},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "seed": 5, "min_tokens": 1},
    {"temperature": 0.0, "stop": ("second", ":")},
    {"temperature": 1.0, "seed": 6, "top_p": 0.8, "repetition_penalty": 1.1},
)
OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 7, "extra": {"xtc": {"probability": 1.0, "threshold": 0.01}}},
    {"temperature": 1.0, "seed": 8, "extra": {"typical": {"mass": 0.5}}},
    {"temperature": 1.0, "seed": 9, "extra": {"mirostat": {"tau": 2.0, "eta": 0.5}}},
    {"temperature": 1.0, "seed": 10, "logit_bias": dict.fromkeys(range(40, 50), 3.0)},
    {"temperature": 1.0, "seed": 11, "bad_words_token_ids": ((300, 301), (60, 61))},
)
PROCESSORS = "logits_processors=[min_tokens,xtc,typical,mirostat]"
SMALL_STEPS = ("scheduler.max_num_scheduled_tokens=20", "scheduler.max_num_running_reqs=16")
PAIRS = [
    *product(SPECS, WAYS),
    *product(OTHER_SPECS, WAYS[:3]),
    *product((SPECS[0], *OTHER_SPECS), OTHER_WAYS),
]
ONE_BY_ONE = "structured_outputs.jump_forward=false"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("grammar") / "model", "llama", max_position_embeddings=2048)


def calls(max_tokens: int = 400) -> list[GenerateRequest]:
    made = []
    for spec, params in PAIRS:
        prompt = [(7 * len(made) + place) % 300 + 6 for place in range(3 + len(made) % 20)]
        made.append(call(f"r{len(made)}", prompt, max_tokens, grammar=spec, **params))
    return made


async def run(
    folder: Path,
    *overrides: str,
    made: Callable[[], list[GenerateRequest]] = calls,
    solo: bool = False,
) -> tuple[list[Answered], int, int]:
    """Answers, steps, and preemptions."""
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1", PROCESSORS)
    async with running(*fixed, *overrides) as pipeline:
        answers = await (pipeline.answer_each(made()) if solo else pipeline.answer_all(made()))
        return answers, len(pipeline.steps), sum(step.num_preemptions for step in pipeline.steps)


def ids(answers: list[Answered]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in answer.choices] for answer in answers]


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> tuple[list[Answered], int, int]:
    return asyncio.run(run(folder, ONE_BY_ONE, "cache.enable_prefix_caching=false", solo=True))


def test_every_answer_is_in_its_language(one_by_one: tuple[list[Answered], int, int]) -> None:
    for request, answer in zip(calls(), one_by_one[0], strict=True):
        for choice in answer.choices:
            if request.params.stop:
                continue
            assert choice.finish_reason is FinishReason.STOP, (request.params, choice.text)
            assert_in_language(request.params.grammar, choice.text)


def assert_in_language(spec: GrammarSpec | None, text: str) -> None:
    assert spec is not None
    match spec.kind:
        case "json_schema":
            text = text.partition(spec.after)[2] if spec.after else text
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(DATE, text), text
        case "choice":
            assert text in CHOICES
        case "ebnf":
            assert re.fullmatch("<((first|second|[0-9])(; )?)+(?<!; )>", text), text
        case "structural_tag":
            assert re.fullmatch(r'<call>\{ ?"x": ?-?[0-9]+\}</call>|<stop at=(true|false)>', text), text


@pytest.mark.parametrize("solo", [True, False], ids=["solo", "batched"])
async def test_forced_tokens_at_once_are_the_same_in_fewer_steps(
    solo: bool, folder: Path, one_by_one: tuple[list[Answered], int, int]
) -> None:
    answers, num_steps, _ = await run(folder, solo=solo)
    assert ids(answers) == ids(one_by_one[0])
    assert not solo or num_steps < 0.7 * one_by_one[1]


async def test_one_by_one_in_a_batch_is_the_same(folder: Path, one_by_one: tuple[list[Answered], int, int]) -> None:
    assert ids((await run(folder, ONE_BY_ONE))[0]) == ids(one_by_one[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache.num_blocks=40",),
        ("cache.num_blocks=40", "cache.num_swap_blocks=64", "scheduler.preemption=swap", "cache.swap_checksums=true"),
        ("cache.num_blocks=27", "prefill.chunk_size=7", *SMALL_STEPS),
        ("cache.num_blocks=60", "scheduler=priority"),
        ("cache.num_blocks=60", "scheduler=time_slice", "scheduler.num_iterations=3"),
    ],
    ids=["recompute", "swap", "small steps", "priority", "time_slice"],
)  # fmt: skip
async def test_preempted_answers_are_the_same(
    overrides: tuple[str, ...], folder: Path, one_by_one: tuple[list[Answered], int, int]
) -> None:
    answers, _, num_preemptions = await run(folder, *overrides)
    assert ids(answers) == ids(one_by_one[0])
    assert num_preemptions


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 17, 30])
async def test_an_answer_that_is_cut_is_a_beginning_of_the_whole(
    max_tokens: int, folder: Path, one_by_one: tuple[list[Answered], int, int]
) -> None:
    """Bug L2: what is cut says `length`, and forced tokens do not run past `max_tokens`."""
    answers, _, _ = await run(folder, made=lambda: calls(max_tokens))
    for answer, whole in zip(answers, one_by_one[0], strict=True):
        for choice, full in zip(answer.choices, whole.choices, strict=True):
            assert choice.token_ids == full.token_ids[:max_tokens]
            cut = len(choice.token_ids) < len(full.token_ids)
            assert (choice.finish_reason is FinishReason.LENGTH) is cut, choice


async def test_neighbours_without_a_grammar_notice_nothing(folder: Path) -> None:
    plain = [call(f"p{index}", list(range(6 + index, 30)), 24, temperature=0.0) for index in range(4)]
    alone, _, _ = await run(folder, made=lambda: plain, solo=True)
    mixed, _, _ = await run(folder, made=lambda: [*plain, *calls()[:9]])
    assert ids(mixed[:4]) == ids(alone)
