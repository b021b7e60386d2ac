"""A model whose head is wider than its tokenizer: the rows without text are never sampled (bugs G8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.errors import RequestError
from core.request import GrammarSpec
from core.testing.harness.pipelines import RunningPipeline, call, running
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import byte_level_bpe

TOKENIZER = byte_level_bpe()
PADDED = TOKENIZER.vocab_size + 150
PADDING = range(TOKENIZER.vocab_size, PADDED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("padded") / "model", vocab_size=PADDED)


@pytest.fixture
async def pipeline(folder: Path, dtype: str) -> AsyncIterator[RunningPipeline]:
    overrides = (f"model.source={folder}", f"model.dtype={dtype}", "executor.num_threads=1", "cache.num_blocks=256")
    async with running(*overrides) as pipeline:
        yield pipeline


def test_the_model_would_like_to_sample_padding(folder: Path) -> None:
    """Else the tests below would show nothing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        probabilities = model(input_ids=torch.tensor([[9, 80, 7, 99, 201]])).logits[0].div(2.0).softmax(-1)
    assert (probabilities[:, PADDING].sum(-1) > 0.05).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.95}, {"top_k": 300}, {"min_p": 0.001}, {"presence_penalty": 2.0}])
async def test_2000_tokens_all_have_text(pipeline: RunningPipeline, params: dict[str, Any]) -> None:
    calls = [call(f"r{i}", [6 + i, 80, 7], 100, temperature=2.0, seed=i, n=2, **params) for i in range(10)]
    answers = await pipeline.answer_all(calls)
    ids = [token_id for answer in answers for choice in answer.choices for token_id in choice.token_ids]
    assert len(ids) == 2000 and len(set(ids)) > 100
    assert all(TOKENIZER.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize("dtype", ["float32"])
async def test_a_grammar_covers_the_whole_width(pipeline: RunningPipeline) -> None:
    grammar = GrammarSpec(kind="regex", source="[^\n]{150,}")
    calls = [call(f"r{i}", [6 + i, 80, 7], 100, temperature=2.0, seed=i, grammar=grammar) for i in range(5)]
    answers = await pipeline.answer_all(calls)
    ids = [token_id for answer in answers for token_id in answer.token_ids]
    assert len(ids) > 300 and len(set(ids)) > 50
    assert all(TOKENIZER.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize("dtype", ["float32"])
async def test_greedy_logprobs_and_refusals(pipeline: RunningPipeline) -> None:
    answer = await pipeline.answer(call("greedy", [9, 80, 7], 100, logprobs=20, prompt_logprobs=20))
    assert max(answer.token_ids) < PADDING.start
    assert answer.prompt_logprobs is not None
    shown = {token_id for row in (*answer.choices[0].logprobs, *answer.prompt_logprobs) for token_id, _ in row.top}
    assert max(shown) < PADDING.start
    with pytest.raises(RequestError, match="allowed_token_ids"):
        await pipeline.answer(call("allowed", [9, 80, 7], 20, allowed_token_ids=tuple(PADDING)))
    biased = await pipeline.answer(call("biased", [9, 80, 7], 20, logit_bias=dict.fromkeys(PADDING, 100.0)))
    assert biased.token_ids == answer.token_ids[:20]
