"""What no value satisfies is refused, or left out of what may be written: masks never lead into it."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.grammar.schema.normalise import normalise
from core.stages.grammar import GrammarError

NO_VALUE: list[Any] = [
    {"type": "object", "patternProperties": {"^1.*2$": False, "^a$": False}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": False, "b$": False}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a$": {}}, "properties": {"a": False}, "additionalProperties": False,
     "minProperties": 1},
    {"type": "object", "patternProperties": {"": False}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": False, "^[^a]": False, "^$": False}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": {"type": "string", "pattern": "^ab$", "maxLength": 1}, "^b": False},
     "additionalProperties": False, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": False}, "required": ["ab"]},
    {"type": "object", "patternProperties": {"^a": False, "^[^a]|^$": False}, "properties": {"a": {}}, "minProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^b"}, "required": ["ab"]},
    {"type": "object", "propertyNames": {"pattern": "^a$"}, "properties": {"a": False}, "minProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^a$"}, "required": ["a"], "minProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^abc$", "maxLength": 2}, "minProperties": 1},
    {"type": "object", "propertyNames": {"enum": ["a"]}, "minProperties": 2},
    {"type": "object", "additionalProperties": {"type": "string", "pattern": "^a$", "maxLength": 0}, "minProperties": 1},
    {"type": "string", "pattern": "^abc$", "maxLength": 2},
    {"type": "string", "pattern": "^a{3}$", "minLength": 4},
    {"type": "string", "pattern": "^(aa)*$", "minLength": 3, "maxLength": 3},
    {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^(?!a)b?$", "minLength": 2}},
    {"type": "array", "minItems": 3, "prefixItems": [{"type": "string", "pattern": "^a$", "maxLength": 0}]},
    {"type": "array", "contains": {"type": "string", "pattern": "^ab$", "maxLength": 1}},
    {"type": "array", "uniqueItems": True, "items": {"type": "null"}, "minItems": 2},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 3},
]  # fmt: skip


@pytest.mark.parametrize("schema", NO_VALUE)
def test_what_no_value_satisfies_is_never_led_into(schema: Any) -> None:
    with pytest.raises(GrammarError, match="no value of finite size"):
        normalise(schema)
    items = {"type": "array", "items": schema}
    assert normalise(items) == {"type": "array", "items": False}
    inside = {"type": "object", "properties": {"l": items, "o": schema}, "required": ["l"]}
    assert normalise(inside)["properties"] == {"l": {"type": "array", "items": False}, "o": False}
    assert normalise({"anyOf": [schema, {"type": "null"}]}) == {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"patternProperties": {"^1.*2$": False, "^a$": False}, "additionalProperties": False}, {}),
        ({"patternProperties": {"^a$": False, "^b$": {}}, "additionalProperties": False, "minProperties": 1}, {"b": 1}),
        ({"patternProperties": {"^(a|b)$": {}}, "properties": {"a": False}, "additionalProperties": False}, {"b": 1}),
        ({"patternProperties": {"^a": False, "^[^a]": False}, "minProperties": 1}, {"": 1}),
        ({"patternProperties": {"^a$": {"type": "null"}}, "properties": {"a": {}}, "minProperties": 1}, {"a": None}),
        ({"propertyNames": {"maxLength": 1}, "required": ["a"], "minProperties": 2}, {"a": 1, "": 1}),
    ],
)
def test_names_that_are_left_keep_their_values(schema: Any, value: Any) -> None:
    before, after = (
        Draft202012Validator(one) for one in ({"type": "object"} | schema, normalise({"type": "object"} | schema))
    )
    for one in ({}, {"a": 1}, {"a": None}, {"b": 1}, {"": 1}, {"ab": 1}, {"a": 1, "b": 1}, value):
        assert before.is_valid(one) == after.is_valid(one), one
    assert after.is_valid(value)
