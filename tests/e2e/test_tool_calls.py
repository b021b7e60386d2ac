"""Questions with tools as BFCL has them, through the whole server: what `check_structured tools` measures is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from core.lab.bfcl_tools import CATEGORIES, DATA, MAX_TOOLS_CHARS, Question, read_questions
from core.lab.tool_calls import ENDS, Answer, Call, CallRun, cases_of, counted, flaws_of, run, tiny_model

AREA: dict[str, Any] = {
    "name": "geometry.area",
    "description": "The area of a shape.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float"},
            "unit": {"type": "String", "enum": ["m", "cm"], "optional": True},
            "corners": {"type": "tuple", "items": {"type": "int"}},
        },
        "required": ["base"],
    },
}
NOTE: dict[str, Any] = {
    "name": "note",
    "parameters": {"type": "dict", "properties": {"done": {"type": "bool"}}, "required": ["done"]},
}
MESSAGES = ({"role": "user", "content": "The area of a triangle with a base of 3 m?"},)
QUESTIONS = [Question(f"q{at}", "parallel_multiple", MESSAGES, (AREA, NOTE)) for at in range(6)]
REQUIRED, NAMED = cases_of(QUESTIONS)[:2]
SINGLE = replace(REQUIRED, question=replace(QUESTIONS[0], category="multiple"))
GOOD = Answer(None, [Call("note", '{"done": true}')], "tool_calls", [1, 2])


@pytest.mark.parametrize("tool_parser", ["hermes", "pythonic", "qwen3_coder"])
async def test_streamed_calls_are_those_that_come_whole(tool_parser: str, tmp_path: Path) -> None:
    found = await run([*tiny_model(tmp_path), f"tool_parser={tool_parser}"], QUESTIONS, ENDS)
    assert found.flaws == [] and found.num_drifted == 0 and found.num_undeclared == 0
    assert (found.num_pairs, found.num_named) == (6, 3) and found.num_calls >= 3


def test_each_flaw_is_found() -> None:
    assert (REQUIRED.named, NAMED.named) == ("", "note")
    assert flaws_of(NAMED, GOOD) == []
    calls = {
        '{"done": 1}': "$.done 1 is not of type 'boolean'",
        "{}": "$ 'done' is a required property",
        "[]": "$ [] is not of type 'object'",
        '{"done"': "Expecting ':' delimiter: line 1 column 8 (char 7): '{\"done\"'",
    }
    for arguments, flaw in calls.items():
        assert flaws_of(NAMED, replace(GOOD, calls=[Call("note", arguments)])) == [flaw]
    assert flaws_of(NAMED, replace(GOOD, calls=[Call("geometry.area", '{"base": 1}')])) == ["a call of 'geometry.area'"]
    assert flaws_of(REQUIRED, replace(GOOD, calls=[Call("other", "{}")])) == ["a call of 'other'"]
    assert flaws_of(NAMED, replace(GOOD, calls=GOOD.calls * 2)) == ["2 calls, and one is all there may be"]
    assert flaws_of(SINGLE, replace(GOOD, calls=GOOD.calls * 2)) == ["2 calls, and one is all there may be"]
    assert flaws_of(REQUIRED, replace(GOOD, calls=GOOD.calls * 2)) == []
    assert flaws_of(NAMED, Answer(error="no")) == ["no"]
    assert flaws_of(NAMED, Answer("Hm.", [], "stop")) == ["content 'Hm.'", "finish_reason stop", "no call"]


def test_of_a_cut_answer_the_last_call_is_left_out() -> None:
    cut = Answer(None, [*GOOD.calls, Call("note", '{"do')], "length", [1, 2])
    assert flaws_of(REQUIRED, cut) == []
    assert flaws_of(REQUIRED, replace(cut, calls=cut.calls[::-1])) != []


def test_pairs_that_differ_are_told() -> None:
    found = CallRun()
    counted(found, REQUIRED, GOOD, replace(GOOD))
    counted(found, REQUIRED, GOOD, replace(GOOD, token_ids=[1, 3], calls=[Call("note", '{"done": false}')]))
    assert (found.num_pairs, found.num_drifted, found.flaws) == (2, 1, [])
    counted(found, NAMED, GOOD, replace(GOOD, finish_reason="length"))
    assert len(found.flaws) == 1 and found.flaws[0].startswith("q1 (note): streamed ")


def test_questions_are_spread_over_the_categories(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "data.whl", "w") as packed:
        for rank, category in enumerate(CATEGORIES):
            rows = [
                {"id": f"{category}_{at}", "question": [list(MESSAGES)], "function": [AREA]}
                for at in range(2 + 4 * rank)
            ]
            rows.append({**rows[0], "function": [{**AREA, "description": "x" * MAX_TOOLS_CHARS}]})
            packed.writestr(f"{DATA}BFCL_v4_{category}.json", "\n".join(map(json.dumps, rows)))
    found = read_questions(tmp_path / "data.whl", 40)
    num = [sum(one.category == category for one in found) for category in CATEGORIES]
    assert num == [2, 5, 5, 4, 4, 4, 4, 4, 4, 4] and len({one.id for one in found}) == 40
    assert [one.category for one in found[:10]] == list(CATEGORIES)
    assert found == read_questions(tmp_path / "data.whl", 40)
    named = [bool(case.named) for case in cases_of(found)]
    assert sum(named) == 20
