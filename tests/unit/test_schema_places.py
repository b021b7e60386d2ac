"""Where in a schema others stand, and what walks there: whatever a property is called, and in every draft."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.grammar.schema.foreign_types import with_json_types
from core.grammar.schema.places import IN_LISTS, IN_OBJECTS, IN_PLACE, below, escaped, with_below
from plugins.frontends.structured_outputs import closed_schema
from plugins.grammars.json_text import subschemas
from plugins.tool_parsers.structures import list_of_calls

PART = {"type": "int", "properties": {"a": {}}, "$ref": "#/$defs/x"}
HOLDERS: list[Any] = [
    *({keyword: PART} for keyword in sorted(IN_PLACE)),
    *({keyword: [True, PART]} for keyword in sorted(IN_LISTS)),
    *({keyword: {name: PART}} for keyword in sorted(IN_OBJECTS) for name in ("default", "enum", "const", "a/b~c")),
]
ELSEWHERE: list[Any] = [
    {"const": PART}, {"enum": [PART]}, {"default": PART}, {"examples": [PART]}, {"x-mine": PART},
    {"dependencies": {"a": ["type"]}},
]  # fmt: skip


def parts(schema: Any) -> list[Any]:
    return [one for _, one in below(schema) if not isinstance(one, bool)]


@pytest.mark.parametrize("schema", HOLDERS, ids=json.dumps)
def test_each_place_is_found_by_all(schema: Any) -> None:
    before = json.dumps(schema)
    assert parts(schema) == [PART]
    assert [one for one in subschemas(schema) if one is PART] == [PART]
    assert parts(with_json_types(schema)) == [{**PART, "type": "integer"}]
    is_condition = schema.keys() & {"not", "if"}
    assert parts(closed_schema(schema)) == [PART if is_condition else {**PART, "additionalProperties": False}]
    (keyword,) = schema
    (path,) = (path for path, one in below(schema) if one is PART)
    assert path[0] == keyword
    assert with_below(schema, lambda one: one, frozenset(schema)) == schema == with_below(schema, lambda one: one)
    assert with_below(schema, lambda one: 7, frozenset((keyword,))) == schema
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    spec = list_of_calls("[CALLS]", tools, "required", True)
    assert spec is not None
    (call,) = json.loads(spec.source)["structures"][0]["schema"]["items"]["anyOf"]
    moved = parts(call["properties"]["arguments"])
    assert moved == [{**PART, "$ref": "#/items/anyOf/0/properties/arguments/$defs/x"}]
    assert json.dumps(schema) == before, "what was given is left alone"


@pytest.mark.parametrize("schema", ELSEWHERE, ids=json.dumps)
def test_what_is_no_schema_is_left_alone(schema: Any) -> None:
    assert parts(schema) == []
    assert with_json_types(schema) == closed_schema(schema) == with_below(schema, lambda one: 7) == schema
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    spec = list_of_calls("[CALLS]", tools, "required", True)
    assert spec is not None
    (call,) = json.loads(spec.source)["structures"][0]["schema"]["items"]["anyOf"]
    assert call["properties"]["arguments"] == {**schema, "type": "object"}


def test_what_stands_where_a_schema_is_due_is_shown_as_it_is() -> None:
    assert list(below({"items": 3, "anyOf": 4, "properties": [5], "allOf": [6], "$defs": {"x": None}})) == [
        (("items",), 3),
        (("allOf", "0"), 6),
        (("$defs", "x"), None),
    ]
    assert escaped("a/b~c") == "a~1b~0c"
