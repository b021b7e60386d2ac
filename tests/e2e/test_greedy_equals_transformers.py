"""The whole pipeline on real models against transformers: 20 prompts of each, batched, judged token by token.

Teacher forcing: the reference reads prompt and our tokens in one pass and says at every position which token it would
have chosen there. One tie decided otherwise therefore does not make everything after it a mismatch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import transformers

from core.host_cpu import cpu_flags
from core.lab.prose import SENTENCES, passage
from core.lab.teacher_forcing import Reference
from core.model.describe import read_spec
from core.model.gguf import GGUFFile
from core.model.spec import ModelFiles
from core.model.tokenizer import load_tokenizer
from core.stages.renderer import ChatPrompt, Prompt, RendererContext, TextPrompt
from core.stages.text_renderer import Text
from core.testing.harness.pipelines import Answered, call, running
from core.testing.harness.transformers_equality import assert_equals_transformers

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_TOKENS = 64
TIE = 1e-3  # largest difference of float32 logits that counts as a tie
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers above 50.",
    "Translate 'good morning' into German, Spanish and Czech.",
    "Write a Python function that reverses a string.",
    "Who are you?",
    "Give me a recipe for pancakes.",
)
CHATS = (
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "How do I tie a bowline?"},
    ],
    [
        {"role": "user", "content": "Hello! My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, how can I help?"},
        {"role": "user", "content": "What is my name? " + " ".join(SENTENCES)},
    ],
)


TEXTS = (
    "The capital of France",
    "Once upon a time",
    "import numpy as",
    "1, 1, 2, 3, 5, 8,",
    "Der Hund",
    SENTENCES[5],
    passage(2),
    passage(4, 3),
    passage(7, 1),
    passage(15, 2),
)


@dataclass(frozen=True)
class Case:
    files: ModelFiles
    prompts: Sequence[Prompt]
    reference: Reference

    def judge(self, answers: Sequence[Answered]) -> list[float]:
        """Per token, by how much the reference prefers its own choice: 0 where it would have chosen the same."""
        return [gap for one in answers for gap in self.reference.gaps(one.prompt_token_ids, one.token_ids)]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    files: ModelFiles = request.getfixturevalue(request.param)
    texts: list[Prompt] = [TextPrompt(text) for text in TEXTS]
    if request.param == "smollm2":
        prompts = [*texts, *(ChatPrompt(messages) for messages in CHATS)]
    else:  # a base model without chat template, and a window of 512 tokens
        turns = (f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n" for question in QUESTIONS)
        prompts = [*texts, *map(TextPrompt, turns), TextPrompt(passage(33)), TextPrompt(passage(37, 5))]
    yield Case(files, prompts, Reference(files))


async def generate(case: Case, dtype: str, max_tokens: int = MAX_TOKENS) -> list[Answered]:
    calls = [call(str(index), prompt, max_tokens) for index, prompt in enumerate(case.prompts)]
    source = f"model.source={case.files.path}"
    async with running(source, f"model.dtype={dtype}", "cache.num_blocks=600") as pipeline:
        answers = await pipeline.answer_all(calls)
        assert max(step.num_requests for step in pipeline.steps) >= 16, "the prompts did not share steps"
    assert all(len(answer.token_ids) == max_tokens for answer in answers)
    return answers


def test_weights_equal_transformers_loader(case: Case) -> None:
    """Here, where the reference is loaded anyway: that takes a minute."""
    assert_equals_transformers(GGUFFile.open(case.files.path), case.reference.model)


def test_float32_chooses_what_transformers_chooses(case: Case) -> None:
    answers = asyncio.run(generate(case, "float32"))
    lengths = sorted(len(answer.prompt_token_ids) for answer in answers)
    gaps = case.judge(answers)
    mismatches = [gap for gap in gaps if gap > 0]
    print(
        f"\n{case.files.path.name}: prompts of {lengths} tokens, {len(mismatches)} of {len(gaps)} tokens differ: {mismatches}"
    )
    assert lengths[0] <= 6 and max(len(a.prompt_token_ids) for a in answers[: len(TEXTS)]) >= 300
    assert max(gaps) < TIE
    config = case.reference.model.config
    if config.model_type == "gemma3_text":
        assert lengths[-2] > 700 > config.sliding_window == 512
    tokenizer = load_tokenizer(case.files)
    for answer in answers:
        before = tokenizer.decode(answer.prompt_token_ids)
        assert before + answer.text == tokenizer.decode([*answer.prompt_token_ids, *answer.token_ids])


def test_bfloat16_stays_close_to_float32(case: Case) -> None:
    native = bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})  # else torch takes four times as long
    gaps = case.judge(asyncio.run(generate(case, "bfloat16", MAX_TOKENS if native else 24)))
    agreement = sum(gap == 0 for gap in gaps) / len(gaps)
    print(f"\n{case.files.path.name}: {agreement:.4f} of {len(gaps)} tokens agree, largest gap {max(gaps):.3f}")
    assert agreement >= 0.97
    assert max(gaps) < 0.5


def test_rendered_chats_equal_transformers(smollm2: ModelFiles) -> None:
    library = transformers.AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    renderer = Text(Text.Settings(), RendererContext(read_spec(smollm2, max_model_len=None), load_tokenizer(smollm2)))
    for messages in CHATS:
        for generation in (True, False):
            theirs = library.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=generation, return_dict=False
            )
            assert renderer.render(ChatPrompt(messages, add_generation_prompt=generation)).token_ids == theirs
