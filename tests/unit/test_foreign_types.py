"""Types of Python and Java in the schemas of tools."""

from __future__ import annotations

import pytest

from core.grammar.schema.foreign_types import with_json_types
from core.grammar.schema.normalise import normalise
from core.stages.grammar import GrammarError

TOOL = {
    "type": "dict",
    "properties": {
        "a": {"type": "float", "description": "type: dict"},
        "b": {"type": "tuple", "items": {"type": "String"}},
        "c": {"type": "any"},
        "d": {"type": ["int", "None"]},
        "type": {"type": "HashMap", "additionalProperties": {"anyOf": [{"type": "long"}, {"type": "ArrayList"}]}},
    },
    "required": ["a"],
}


def test_types_become_those_of_json() -> None:
    found = with_json_types(TOOL)
    assert found == {
        "type": "object",
        "properties": {
            "a": {"type": "number", "description": "type: dict"},
            "b": {"type": "array", "items": {"type": "string"}},
            "c": {},
            "d": {"type": ["integer", "null"]},
            "type": {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "array"}]}},
        },
        "required": ["a"],
    }
    assert TOOL["type"] == "dict"  # the given one is left alone
    normalise(found)


def test_without_it_they_are_refused() -> None:
    with pytest.raises(GrammarError, match="type at # must be"):
        normalise(TOOL)


def test_what_nobody_knows_stays() -> None:
    for schema in ({"type": "strnig"}, {"type": 7}, {"type": ["string", 7]}, True, {"properties": 3, "items": [1]}):
        assert with_json_types(schema) == schema
