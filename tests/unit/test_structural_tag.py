"""One reading of structural tags: who bounds them, who compiles them and who writes them agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import RequestError
from core.grammar.bounds import bounded
from core.grammar.compilation import normalised
from core.request import GrammarSpec
from core.settings import StructuredOutputSettings
from core.stages.grammar import GrammarBackend, GrammarError
from core.stages.structural_tag import StructuralTag, Structure, parse_structural_tag

ONE = {"begin": "<a>", "schema": {"type": "integer", "const": 10**30}, "end": "</a>"}
TAG = {"structures": [ONE], "triggers": ["<a"]}
WRONG: list[tuple[Any, str]] = [
    ([], "structural tag"),
    ({**TAG, "structures": []}, "no structures"),
    ({**TAG, "triggers": ["<b"]}, "no trigger for what begins '<a>'"),
    ({**TAG, "triggers": ["<a", ""]}, "trigger that is empty"),
    ({**TAG, "triggers": [""], "at_least_one": True}, "trigger that is empty"),
    ({**TAG, "structures": [{"begin": "<a>", "schema": {}}]}, "end"),
    ({**TAG, "structures": [{**ONE, "schema": 3}]}, "schema"),
    ({**TAG, "structures": [{**ONE, "more": 1}]}, "more"),
    ({**TAG, "separator": 3}, "separator"),
    ({**TAG, "at_once": True}, "at_once"),
]


@pytest.mark.parametrize(("tag", "words"), WRONG)
def test_what_one_refuses_all_refuse(backend: GrammarBackend, tag: Any, words: str) -> None:
    spec = GrammarSpec(kind="structural_tag", source=json.dumps(tag))
    with pytest.raises(RequestError, match=words) as caught:
        bounded(spec, StructuredOutputSettings(), "response_format")
    assert caught.value.code == "invalid_grammar"
    for refuse in (normalised, backend.compile):
        with pytest.raises(GrammarError, match=words):
            refuse(spec)


def test_what_is_written_is_read() -> None:
    tag = parse_structural_tag(json.dumps(TAG))
    assert tag == StructuralTag(structures=(Structure(**ONE),), triggers=("<a",))
    assert json.loads(tag.source()) == TAG and parse_structural_tag(tag.source()) == tag
    full = StructuralTag(structures=tag.structures, triggers=(), at_least_one=True, separator="é")
    assert parse_structural_tag(full.source()) == full and not full.has_free_text
    assert full.with_schemas(lambda schema: False).structures[0].schema is False


def test_the_shortest_trigger_begins_a_structure() -> None:
    structure = Structure(begin="<ab>", schema=True, end="")
    tag = StructuralTag(structures=(structure,), triggers=("<ab", "<a", "b"))
    assert tag.trigger_of(structure) == "<a"
    assert StructuralTag(structures=(structure,), triggers=(), at_least_one=True).trigger_of(structure) == ""


@pytest.mark.parametrize("source", ["", "{", "[" * 100_000])
def test_what_is_no_json(source: str) -> None:
    with pytest.raises(GrammarError, match="structural tag"):
        parse_structural_tag(source)
