"""A part of the JSON-Schema-Test-Suite: nothing invalid is let out, and nothing is worse than it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from core.lab import bfcl_tools
from core.lab.json_schema_suite import (
    RATCHET,
    Group,
    Verdict,
    alone,
    better,
    count,
    read_groups,
    read_ratchet,
    run,
    table,
    texts,
    through,
    worse,
)
from core.stages.grammar import GrammarError

DATA = Path(__file__).parents[1] / "data"


def test_the_sample_is_as_good_as_it_was() -> None:
    results = run(read_groups(DATA / "json_schema_suite"), through(["llguidance"]))
    counts = count(results)
    assert counts[Verdict.FALSE_POSITIVE] == counts[Verdict.CRASH] == 0
    assert worse(results, read_ratchet(RATCHET)) == []
    assert sum(counts.values()) > 450
    assert counts[Verdict.PASSED] > 0.8 * sum(counts.values())
    ratchet = read_ratchet(RATCHET)
    known = {file: {name: ratchet[file][name] for name in groups} for file, groups in results.items()}
    assert better(known, known) == 0 and count(known).keys() <= {
        Verdict.PASSED,
        Verdict.REFUSED,
        Verdict.FALSE_NEGATIVE,
    }


def test_xgrammar_lets_nothing_else_out() -> None:
    pytest.importorskip("xgrammar", reason="pip install nonet[xgrammar]")
    groups = [
        group
        for group in read_groups(DATA / "json_schema_suite")
        if group.file in ("allOf.json", "not.json", "enum.json")
    ]
    counts = count(run(groups, through(["xgrammar"])))
    assert counts[Verdict.FALSE_POSITIVE] == counts[Verdict.CRASH] == 0
    assert counts[Verdict.PASSED] > 60


class Says:
    """A grammar of these texts."""

    def __init__(self, *texts: str):
        self.texts = texts

    def accepts(self, text: str) -> bool:
        if text == "7":
            raise RuntimeError
        return text in self.texts


def compile_schema(schema: Any, asserts_formats: bool) -> Says:
    if schema == {}:
        raise GrammarError("not supported")
    if schema is True:
        raise ValueError
    return Says(*schema["texts"], "formats" if asserts_formats else "")


def test_verdicts() -> None:
    groups = [
        Group("a.json", "one", {"texts": ["1", '{"b": 2, "a": 1}']}, ((1, True), ({"a": 1, "b": 2}, True))),
        Group("a.json", "one", {"texts": ["1"]}, ((2, True), (1, False))),
        Group("a.json", "one", {}, ((1, True),)),
        Group("a.json", "two", {"texts": ['"\\u0061"']}, (("a", False), ("b", False), (7, True))),
        Group("optional/format/b.json", "three", True, ((1, True),)),
    ]  # fmt: skip
    results = run(groups, compile_schema)
    assert results == {"a.json": {"one": "ppnwr", "two": "wpc"}, "optional/format/b.json": {"three": "c"}}
    assert count(results)[Verdict.FALSE_POSITIVE] == 2
    assert "false positive" in table({"x": results})


def test_only_better_is_allowed() -> None:
    was = {"a.json": {"one": "prn"}}
    assert worse({"a.json": {"one": "prn"}}, was) == []
    assert worse({"a.json": {"one": "ppp"}}, was) == [] and better({"a.json": {"one": "ppp"}}, was) == 2
    assert worse({"a.json": {"one": "rrn"}}, was) == ["a.json: one, test 0: pass, now refused"]
    assert worse({"a.json": {"one": "pwn"}}, was) == ["a.json: one, test 1: refused, now false positive"]
    assert worse({"b.json": {"new": "r"}}, was) == [] and len(worse({"b.json": {"new": "w"}}, was)) == 1


def test_texts_of_a_value() -> None:
    assert list(texts({"a": 1.0, "b": []}, with_escapes=False)) == [
        '{"a": 1.0, "b": []}',
        '{"a": 1, "b": []}',
        '{"b": [], "a": 1.0}',
        '{"b": [], "a": 1}',
    ]
    assert '{"\\u00e9": "\\ud83d\\ude00"}' in list(texts({"é": "😀"}, with_escapes=True))


def test_llguidance_alone_is_worse() -> None:
    """What the rewriting is for: a name that stands there as an escape is another one to it."""
    group = Group(
        "a.json", "names", {"properties": {"a": {"type": "integer"}}}, (({"a": "x"}, False), ({"a": 1}, True))
    )
    assert run([group], alone)["a.json"]["names"] == "wp"
    assert run([group], through(["llguidance"]))["a.json"]["names"] == "pp"


def test_tools_of_a_wheel(tmp_path: Path) -> None:
    tool = {"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "float"}}}}
    with ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(
            "bfcl_eval/data/x.json", json.dumps({"function": [tool]}) + "\n" + json.dumps({"function": tool})
        )
        wheel.writestr("bfcl_eval/data/y.json", json.dumps([tool, {**tool, "parameters": {"type": "object"}}]))
        wheel.writestr("elsewhere/z.json", "no JSON")
    assert bfcl_tools.read_parameters(tmp_path / "a.whl") == [tool["parameters"], {"type": "object"}]
