"""Schemas before a grammar is made of them: what comes out is in the subset, and for the same values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.grammar.schema.limits import Limits
from core.grammar.schema.normalise import normalise
from core.stages.grammar import SCHEMA_KEYWORDS, GrammarError


def check_subset(schema: Any) -> None:
    if isinstance(schema, bool):
        return
    said = schema.keys() - {"$defs"}
    for one in schema.get("$defs", {}).values():
        check_subset(one)
    if said in ({"anyOf"}, {"$ref"}, {"enum"}, set()):
        for option in schema.get("anyOf", ()):
            check_subset(option)
        return
    kinds = schema["type"]
    if isinstance(kinds, list):
        assert said == {"type"}
        return
    assert said - {"type"} <= SCHEMA_KEYWORDS[kinds]
    assert schema.get("minProperties", 0) <= len(schema.get("required", ())) + 1
    for one in schema.get("allOf", ()):
        assert one.keys() == {"type", "pattern"} and one["type"] == "string"
    for below in (*schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()):
        check_subset(below)
    for below in (*schema.get("prefixItems", ()), schema.get("items", True), schema.get("additionalProperties", True)):
        check_subset(below)


CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "object", "properties": {"a": {"type": "string"}}}, [{}, {"a": "", "b": 1}], [{"a": 1}, []]),
    ({"minimum": 3}, [3, "x", [], None], [2, 2.9]),  # a keyword is about one kind
    ({"type": ["integer", "string"], "minimum": 3, "maxLength": 1}, [3, "a"], [3.5, "ab", 2, None]),
    ({"enum": [1, "ab", None, {"a": [1]}], "type": ["string", "object"]}, ["ab", {"a": [1]}], [1, None, {"a": [2]}]),
    ({"enum": list(range(20)), "multipleOf": 3, "exclusiveMaximum": 10}, [0, 3, 9], [1, 12, 10]),
    ({"enum": ["a", "ab", "b"], "pattern": "^a"}, ["a", "ab"], ["b", 1]),
    ({"allOf": [{"minimum": 1, "type": "number"}, {"maximum": 3}, {"type": "integer"}]}, [1, 3], [0, 4, 1.5, "1"]),
    ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}, [0, 12, -24], [4, 6]),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b$"}], "type": "string"}, ["ab", "xaxb"], ["a", "ba", "b"]),
    ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 4}]}, [1, 5], [2, 4, "x"]),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"not": {"type": ["string", "null"]}}, [1, True, [], {}], ["", None]),
    ({"not": {"enum": [1, "a", None]}}, [2, 0.5, "b", True, []], [1, 1.0, "a", None]),
    ({"not": {"pattern": "^a"}}, ["b", ""], ["a", "ab", 1]),
    ({"type": "string", "not": {"minLength": 2, "maxLength": 3}}, ["a", "abcd"], ["ab", "abc"]),
    ({"not": {"required": ["a"], "properties": {"a": {"type": "string"}}}}, [{}, {"a": 1}], [{"a": ""}, 1]),
    ({"not": {"items": {"type": "string"}}}, [[1], ["a", 1]], [[], ["a"], 5]),
    ({"type": "number", "not": {"type": "integer"}, "minimum": 0, "exclusiveMaximum": 3}, [0.5, 2.75], [0, 2, 3.5]),
    (
        {
            "if": {"properties": {"k": {"const": 1}}, "required": ["k"]},
            "then": {"required": ["v"]},
            "else": {"maxProperties": 1},
        },
        [{"k": 1, "v": 2}, {"k": 2}, {}, 7],
        [{"k": 1}, {"k": 2, "v": 1}],
    ),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}, 3], [{"a": 1}]),
    (
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": "x"}, {"a": 1, "b": 1}],
        [{"a": 1, "b": "x"}],
    ),
    (
        {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1},
        [[1], [1, "a"]],
        [[], ["a"], [1, 2]],
    ),
    (
        {"items": [{"type": "integer"}], "additionalItems": False},
        [[], [1]],
        [["a"], [1, 2]],
    ),  # as older drafts write it
    ({"contains": {"const": 1}, "maxItems": 3}, [[1], [2, 1], [2, 2, 1]], [[], [2], [1, 2, 3, 4]]),
    ({"contains": {"const": 1}}, [[1], [2, 3, 1, 4]], [[], [2, 2]]),
    (
        {"contains": {"const": 1}, "minContains": 2, "maxContains": 2, "maxItems": 3},
        [[1, 1], [1, 2, 1]],
        [[1], [1, 1, 1]],
    ),
    ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [1], [2, 1, 2]], [[1, 1], [1, 2, 1]]),
    ({"items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}, [[], [1], [2, 1]], [[1, 1], [3]]),
    (
        {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "uniqueItems": True},
        [["a", 1]],
        [[1]],
    ),
    ({"propertyNames": {"pattern": "^a"}}, [{}, {"ab": 1}], [{"b": 1}, {"ab": 1, "b": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}, "minProperties": 1}, [{"a": 1}, {"b": 2, "a": 1}], [{}, {"c": 1}]),
    (
        {
            "properties": {"a": {}, "b": {}, "c": {}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"a": 1}, {"b": 1, "c": 1}],
        [{}, {"a": 1, "b": 1, "c": 1}],
    ),
    ({"properties": {"a": {}}, "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"x": 1}, {"a": 1, "x": 1}], [{}]),
    (
        {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 3}}},
        [{"a": 1}, {"b": "x"}, {"ab": 3}],
        [{"ab": 2}, {"a": "x"}],
    ),
    (
        {
            "unevaluatedProperties": False,
            "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {}}}],
        },
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"c": 1}, {"a": 2}],
    ),
    (
        {"unevaluatedItems": False, "if": {"prefixItems": [{"const": 1}]}, "then": {"prefixItems": [{}, {}]}},
        [[], [1], [1, 2]],
        [[2], [1, 2, 3]],
    ),
    (
        {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}, "additionalProperties": False}
            },
        },
        [{}, {"l": {"l": {}}}],
        [{"l": 1}, {"l": {"x": 1}}],
    ),
    (
        {"$ref": "#node", "$defs": {"a": {"$anchor": "node", "items": {"$ref": "#/$defs/a"}, "type": "array"}}},
        [[], [[], [[]]]],
        [1, [1]],
    ),
    (
        {"$id": "http://x/y", "$ref": "z#/$defs/s", "$defs": {"q": {"$id": "z", "$defs": {"s": {"type": "null"}}}}},
        [None],
        [1],
    ),
    (
        {
            "title": "no",
            "description": "x",
            "x-guidance": {"lenient": True},
            "default": 1,
            "examples": [],
            "type": "null",
        },
        [None],
        [1],
    ),
    (
        {"properties": {"a": {"type": "integer"}}, "required": ["a"], "patternProperties": {"^a$": {"minimum": 2}}},
        [{"a": 2}],
        [{"a": 1}, {}],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda one: json.dumps(one)[:60])
def test_the_same_values(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    found = normalise(schema)
    check_subset(found)
    before, after = Draft202012Validator(schema), Draft202012Validator(found)
    if "additionalItems" not in schema:
        assert [before.is_valid(value) for value in (*valid, *invalid)] == [True] * len(valid) + [False] * len(invalid)
    assert [value for value in valid if not after.is_valid(value)] == []
    assert [value for value in invalid if after.is_valid(value)] == []
    assert normalise(found) is not None


def test_what_is_simple_stays() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "string"}, "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
        "required": ["b"],
        "additionalProperties": False,
    }
    assert normalise(schema) == schema


def test_properties_stand_in_the_order_of_the_schema() -> None:
    found = normalise(
        {
            "allOf": [{"properties": {"z": {}, "m": {}}}, {"properties": {"a": {}}, "required": ["m", "q"]}],
            "properties": {"b": {}, "z": {}},
            "type": "object",
        }
    )
    assert list(found["properties"]) == ["z", "m", "a", "q", "b"]


REFUSED: list[tuple[Any, str]] = [
    ([], "a schema must be"),
    (7, "a schema must be"),
    ({"properties": {"reason": {"type": "stsring"}}}, "type at #/properties/reason must be"),
    ({"type": True}, "type at # must be"),
    ({"type": ["string", "weird"]}, "type at # must be"),
    ({"items": {"properties": []}}, "properties at #/items must be"),
    ({"required": "a"}, "required at # must be"),
    ({"minLength": -1}, "minLength at # must be"),
    ({"maxProperties": float("inf")}, "maxProperties at # must be"),
    ({"allOf": []}, "allOf at # must be"),
    ({"anyOf": [7]}, "anyOf/0 at # must be"),
    ({"enum": 3}, "enum at # must be"),
    ({"pattern": "(a"}, "pattern at #: a bracket is not closed"),
    ({"pattern": "^+[a-z]$"}, "pattern at #"),
    ({"patternProperties": {"(?<=x)a": {}}}, "patternProperties at #"),
    ({"pattern": "(a)\\1"}, "is not supported"),
    ({"$ref": "http://example.com/x"}, "$ref at # is not supported: it leads outside"),
    ({"$ref": "#/$defs/none"}, "$ref at # must be a reference to a schema that is there"),
    ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}, "$ref at # must be a reference to a schema that is there"),
    ({"$ref": "#"}, "refers to itself without a level"),
    (
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        "refers to itself",
    ),
    ({"$schema": "http://example.com/mine"}, "$schema at # is not supported"),
    ({"uniqueItems": True, "type": "array"}, "uniqueItems at # is not supported"),
    ({"type": "object", "minProperties": 3}, "minProperties at # is not supported"),
    ({"type": "number", "not": {"type": "integer"}}, "is not supported"),
    ({"multipleOf": 123456.5, "type": "number"}, "multipleOf"),
    (False, "no value"),
    ({"type": "string", "enum": [1, 2]}, "no value"),
    (
        {"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "enum": [1]}}},
        "satisfies #/properties/a",
    ),
    ({"type": "object", "required": ["a"], "properties": {"a": {"not": {}}}}, "no value"),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
        },
        "no value of finite size",
    ),
    ({"const": 2**70}, "is not supported"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda one: json.dumps(one)[:60])
def test_a_refusal_names_what_it_is_about(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError) as refusal:
        normalise(schema)
    assert message in str(refusal.value)


def nested(levels: int, around: str) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {around: [schema] if around == "allOf" else schema}
    return schema


@pytest.mark.parametrize("around", ["allOf", "items", "not", "additionalProperties", "contains"])
def test_deep_schemas_are_refused(around: str) -> None:
    with pytest.raises(GrammarError):
        normalise(nested(5000, around))


SOME_OF_16 = {"contains": {"type": "integer"}, "minContains": 3, "maxContains": 9}
CLASSES = r"(\p{L}|\p{Lu}\p{N}|\p{S})*"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(4)]} for i in range(12)]},
        {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(40)}},
        {"oneOf": [{"properties": {f"p{j}": {"type": "string"} for j in range(i, i + 10)}} for i in range(20)]},
        {"pattern": "^(([a-z]{1,4}){1,1024})$", "enum": ["a" * 4000]},
        {"properties": {f"p{i}": {} for i in range(40)}, "additionalProperties": False, "minProperties": 20},
        {"type": "array", "items": {"enum": list(range(12))}, "uniqueItems": True, "maxItems": 12},
        {"maxItems": 16, **SOME_OF_16},
        {"maxItems": 16, "allOf": [SOME_OF_16, {"contains": {"minimum": 1}, "minContains": 3, "maxContains": 9}]},
        {"prefixItems": [{}] * 16, "minItems": 16, "maxItems": 20, "items": {"type": "integer"}, **SOME_OF_16},
        {"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 16, "maxItems": 16, "type": "array"},
        {
            "properties": {f"p{i}": {} for i in range(16)},
            "additionalProperties": False,
            "minProperties": 8,
            "maxProperties": 12,
            "type": "object",
        },
        {"patternProperties": {f"^k{i}{CLASSES}$": {"type": ["null", "integer"][i % 2]} for i in range(100)}},
        {
            "required": [f"name{i}xxxxxxxxxx" for i in range(600)],
            "patternProperties": {f"^.{{{i}}}a": {"type": ["null", "integer"][i % 2]} for i in range(40)},
            "anyOf": [{"properties": {f"q{i}": {"const": i}}, "minProperties": i} for i in range(200)],
        },
        {
            "anyOf": [
                {"pattern": f"^.{{0,{340 - i}}}$", "allOf": [{"pattern": f"^[^a]{{0,{350 - i}}}b?$"}]}
                for i in range(100)
            ],
            "type": "string",
        },
        # Each state of the automaton is written in the texts of all others: together they would fill any memory.
        {"type": "string", "not": {"pattern": "^(cccd|a*|dcc|bcc+|(daa+|cb+|bcb+|aacc+)*)*$"}},
    ],
    ids=lambda one: json.dumps(one)[:40],
)
def test_case_splits_are_bounded(schema: Any) -> None:
    with pytest.raises(GrammarError):
        normalise(schema)


def twice(levels: int, keyword: str, other: Any) -> Any:
    """Each of `$defs` leads to the next one, in ways that are looked at more than once."""
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(1, levels + 1)]
    definitions = {f"d{i}": {keyword: [ref, ref if other is None else other]} for i, ref in enumerate(refs)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"properties": {"a": {}}}}}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("keyword", "other"), [("allOf", None), ("oneOf", False)])
def test_what_is_said_again_is_looked_at_once(keyword: str, other: Any) -> None:
    found = Draft202012Validator(normalise({"unevaluatedProperties": False, **twice(40, keyword, other)}))
    assert found.is_valid({"a": 1}) and not found.is_valid({"b": 1})
    chain = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(1500)} | {"r1500": {"type": "null"}}
    properties = {f"p{i}": {"$ref": f"#/$defs/r{i}"} for i in range(700)}
    assert normalise({"type": "object", "properties": properties, "$defs": chain})["properties"]["p9"] == {
        "type": "null"
    }


def test_limits_are_the_callers() -> None:
    schema = {"anyOf": [{"type": "object", "required": [name]} for name in "abcdef"]}
    normalise(schema)
    with pytest.raises(GrammarError):
        normalise(schema, limits=Limits(max_cases=3))


def test_formats() -> None:
    schema = {"type": "string", "format": "date"}
    assert normalise(schema) == {"type": "string"}
    pattern = Draft202012Validator(normalise(schema, formats="known"))
    assert pattern.is_valid("2024-02-29") and not pattern.is_valid("2023-02-29") and not pattern.is_valid("x")
    other = {"type": "string", "format": "idn-hostname"}
    assert normalise(other, formats="known") == {"type": "string"}
    with pytest.raises(GrammarError, match="format at # is not supported"):
        normalise(other, formats="assertion")
    assert normalise({"type": "string", "format": "x-mine"}, formats="assertion") == {"type": "string"}
    with pytest.raises(GrammarError, match="what is not of the format email"):
        normalise({"type": "string", "not": {"format": "email"}}, formats="known")  # its pattern leaves some out


def test_a_dynamic_reference_finds_the_outermost_anchor() -> None:
    schema = {
        "$id": "http://x/strings",
        "$ref": "list",
        "$defs": {
            "item": {"$dynamicAnchor": "item", "type": "string"},
            "list": {
                "$id": "list",
                "type": "array",
                "items": {"$dynamicRef": "#item"},
                "$defs": {"free": {"$dynamicAnchor": "item"}},
            },
        },
    }
    found = Draft202012Validator(normalise(schema))
    assert found.is_valid(["a"]) and not found.is_valid([1])
