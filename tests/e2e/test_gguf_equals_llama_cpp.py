"""Real GGUF files say what llama.cpp says of them (bugs O1; goldens by tests/data/gguf/make_logit_goldens.py).

llama.cpp rounds activations to eight bits where this computes in float32 with the dequantized weights, so values differ by
that noise: 0.1 on average, 1.2 at most (a prompt of three rare tokens). Rows in the wrong order cost whole units everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.model.spec import ModelFiles
from core.model.tokenizer import load_tokenizer
from core.testing.harness.pipelines import call, running

DATA = Path(__file__).parents[1] / "data" / "gguf"
LINES: list[str] = json.loads((DATA / "tokenizer_lines.json").read_text(encoding="utf-8"))
GOLDENS: dict[str, Any] = json.loads((DATA / "logit_goldens.json").read_text(encoding="utf-8"))
CLOSE = 0.75  # of log-probabilities: a race as close as this may go either way


@pytest.mark.model
@pytest.mark.slow
async def test_o1_the_best_token_after_100_prompts(real_model: ModelFiles) -> None:
    rows = GOLDENS[real_model.path.name]
    tokenizer = load_tokenizer(real_model)
    start = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    prompts = [[*start, *tokenizer.encode(LINES[row[0]], add_special_tokens=False)] for row in rows]
    assert [len(prompt) for prompt in prompts] == [row[1] for row in rows]
    calls = [call(f"r{i}", prompt, 1, logprobs=20) for i, prompt in enumerate(prompts)]
    source = f"model.source={real_model.path}"
    async with running(source, "model.dtype=float32", "cache.num_blocks=1500") as pipeline:
        answers = await pipeline.answer_all(calls)
    errors: list[float] = []
    same = 0
    for answer, (number, _, best, logprobs) in zip(answers, rows, strict=True):
        (found,) = answer.choices[0].logprobs
        ours = dict(found.top)
        errors += [abs(ours[i] - value) for i, value in zip(best, logprobs, strict=True)]
        same += found.token_id == best[0]
        assert found.token_id == best[0] or logprobs[0] - logprobs[1] < CLOSE, LINES[number]
    assert same >= 90
    assert sum(errors) / len(errors) < 0.15
    assert max(errors) < 1.5
