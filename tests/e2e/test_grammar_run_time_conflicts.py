"""A grammar beside parameters that bar what it needs, which only shows while it runs: the request's own doing, however often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import GenerationError
from core.request import FinishReason, GrammarSpec
from core.testing.harness.pipelines import call, running
from core.testing.tiny_models import make_tiny_model

DIGITS = GrammarSpec(kind="regex", source="[0-9]{3}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("conflicts") / "model", "llama")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"bad_words": tuple("0123456789")}, "grammar and bad_words"),
        ({"allowed_token_ids": (1, 2, 3, 300, 301)}, "grammar and allowed_token_ids"),
    ],
    ids=["bad_words", "allowed_token_ids"],
)
async def test_a_conflict_names_the_fields_and_costs_nobody_else(
    folder: Path, params: dict[str, Any], named: str
) -> None:
    async with running(f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1") as pipeline:
        for number in range(4):  # more than `plugins.quarantine_after`
            with pytest.raises(GenerationError) as caught:
                await pipeline.answer(call(f"r{number}", [7, 8, 9], 20, grammar=DIGITS, **params))
            assert caught.value.conflict is not None and named in caught.value.conflict, str(caught.value)
        (choice,) = (await pipeline.answer(call("after", [7, 8, 9], 20, grammar=DIGITS))).choices
        assert len(choice.text) == 3 and choice.text.isdigit()
        assert not pipeline.front._incidents.latest()
        await pipeline.assert_whole()


async def test_min_tokens_holds_as_far_as_a_grammar_goes(folder: Path) -> None:
    schema = GrammarSpec(kind="json_schema", source=json.dumps({"enum": ["a", "bc"]}))
    asked = [
        call("digits", [7, 8, 9], 40, grammar=DIGITS, min_tokens=30),
        call("schema", [7, 8], 40, grammar=schema, min_tokens=39),
        call("plus", [7, 8], 40, grammar=GrammarSpec(kind="regex", source="[0-9]+"), min_tokens=12, temperature=0.0),
    ]
    async with running(f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1") as pipeline:
        digits, enum, plus = [answer.choices[0] for answer in await pipeline.answer_all(asked)]
    assert digits.finish_reason is FinishReason.STOP and len(digits.text) == 3
    assert json.loads(enum.text) in ("a", "bc")
    assert len(plus.token_ids) >= 12 and plus.text.isdigit()
