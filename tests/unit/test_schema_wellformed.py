"""Schemas that nothing compiles are read all the same: what is none is named with its place."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from core.grammar.schema.wellformed import check_form
from core.stages.grammar import GrammarError

SUITE = Path(__file__).resolve().parents[1] / "data/json_schema_suite"
WRONG = {
    "type at #: 'objct' is no type; did you mean object": {"type": "objct"},
    "type at #/properties/a~1b: 'strng'": {"properties": {"a/b": {"type": "strng"}}},
    "type at #/anyOf/1: 'None'": {"anyOf": [True, {"type": None}]},
    "type at # must be one or more": {"type": []},
    "required at #/properties/a must be a list of names": {"properties": {"a": {"type": "string", "required": True}}},
    "properties at # must be an object": {"properties": []},
    "enum at #/items must be a list": {"items": {"enum": "a"}},
    "maxLength at # must be a whole number": {"maxLength": -1},
    "minItems at # must be a whole number": {"minItems": 1.5},
    "minimum at # must be a number": {"minimum": "1"},
    "multipleOf at # must be a number": {"multipleOf": True},
    "pattern at # must be a text": {"pattern": 1},
    "#/properties/a must be a schema": {"properties": {"a": "string"}},
    "#/$defs/x must be a schema": {"$defs": {"x": None}},
}
RIGHT = [
    True,
    {},
    {"type": ["string", "null"], "maxLength": 2.0, "minimum": 1, "exclusiveMinimum": True},
    {"properties": {"type": {"type": "string"}, "required": {"const": {"type": "objct"}}}},
    {"default": {"type": 1}, "examples": [{"required": True}], "optional": True, "description": 5, "x-order": ["a"]},
    {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}, "items": [{"type": "string"}, False]},
    {"pattern": "(?<=a)b", "format": "none", "$ref": "#/$defs/not there"},
]


@pytest.mark.parametrize(("told", "schema"), WRONG.items(), ids=WRONG.keys())
def test_what_is_no_schema_is_named(told, schema):
    with pytest.raises(GrammarError) as caught:
        check_form(schema)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("schema", RIGHT, ids=map(json.dumps, RIGHT))
def test_what_a_model_may_be_shown_passes(schema):
    check_form(schema)


def test_no_schema_of_the_suite_is_refused_but_by_its_metaschema():
    schemas = [
        group["schema"]
        for path in SUITE.rglob("*.json")
        for group in json.loads(path.read_text("utf-8"))
        if "schema" in group
    ]
    assert len(schemas) > 100
    for schema in schemas:
        try:
            check_form(schema)
        except GrammarError:
            assert not Draft202012Validator(Draft202012Validator.META_SCHEMA).is_valid(schema), schema


def test_a_deep_schema_is_no_matter():
    schema = {"type": "string"}
    for _ in range(5000):
        schema = {"items": schema}
    check_form(schema)
