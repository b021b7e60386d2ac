"""Grammars of calls: the texts around their arguments, and the schemas of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.grammar.schema.places import with_below
from core.request import GrammarSpec
from core.stages.structural_tag import StructuralTag, Structure
from core.stages.tool_parser import AUTO, REQUIRED


@dataclass(frozen=True, slots=True)
class Wording:
    """A call is `begin`, arguments as JSON, `end`. In `begin`, {name} stands for the tool's name as a JSON text, {word} for the
    name as it is."""

    begin: str
    end: str
    trigger: str  # what `begin` begins with, and content does not have; "" where no content comes before
    separator: str | None = None  # between two calls; None: no call follows another

    def begin_of(self, name: str) -> str:
        return self.begin.format(name=json.dumps(name, ensure_ascii=False), word=name)


def chosen(tools: Sequence[Mapping[str, Any]], choice: str) -> list[Mapping[str, Any]]:
    """The functions that may be called, in the order of the tools."""
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in tools]
    if choice in (AUTO, REQUIRED):
        return functions
    return [function for function in functions if function["name"] == choice]


def schema_of(function: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of a function's arguments, which are an object whatever it says, and none of them is made up. None: it allows
    no object."""
    schema = function.get("parameters") or {}
    kinds = schema.get("type", "object")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    if not is_object:
        return None
    found = {**schema, "type": "object"}
    return found if _refers_to_a_part(found) else declared(found, empty_too=True)


_SAYS_MORE = frozenset(
    (
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties",
        "dependencies", "dependentRequired", "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "if", "$ref",
        "$dynamicRef", "$recursiveRef",
    )
)  # fmt: skip
"""Keywords about properties, or that put schemas together: beside one of them an object stays as open as it is."""


def _refers_to_a_part(schema: Any) -> bool:
    """A reference names something beside the definitions: what is closed in its own place may not be so in another."""
    if isinstance(schema, list):
        return any(map(_refers_to_a_part, schema))
    if not isinstance(schema, dict):
        return False
    reference = schema.get("$ref", "#/$defs/")
    is_part = not (isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")))
    return is_part or any(map(_refers_to_a_part, schema.values()))


def declared(schema: Any, *, empty_too: bool = False) -> Any:
    """The schema with its objects closed that list their properties and say nothing of others.

    By the specification others may come, and a model that is free to will make some up: its caller has no use for them. To an
    object that is meant to be open its schema says so (`"additionalProperties": true`). What is valid here is valid there.

    `empty_too`: for arguments, where an empty list is that of a function without any; elsewhere it is how data sets write a
    dict of anything.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    properties, required = schema.get("properties"), schema.get("required") or []
    if isinstance(properties, dict):
        found["properties"] = {key: declared(one) for key, one in properties.items()}
        has_all = isinstance(required, list) and all(map(list(properties).__contains__, required))
        if (properties or empty_too) and has_all and not _SAYS_MORE & schema.keys():
            found["additionalProperties"] = False
    if "items" in schema:
        found["items"] = declared(schema["items"])
    return found


def structural_tag(
    wording: Wording, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool
) -> GrammarSpec | None:
    """None where there is no such tool, or one whose arguments cannot be an object."""
    functions = chosen(tools, choice)
    schemas = [schema_of(function) for function in functions]
    if not functions or None in schemas:
        return None
    tag = StructuralTag(
        structures=tuple(
            Structure(begin=wording.begin_of(function["name"]), schema=schema or {}, end=wording.end)
            for function, schema in zip(functions, schemas, strict=True)
        ),
        triggers=(wording.trigger,) if wording.trigger else (),
        at_least_one=choice != AUTO,
        stop_after_first=wording.separator is None or not parallel,
        separator=wording.separator or "",
    )
    return _spec(tag)


def _spec(tag: StructuralTag) -> GrammarSpec:
    """Arguments have the white space that models have learnt to write in calls: that of Python's `json.dumps`."""
    return GrammarSpec(kind="structural_tag", source=tag.source(), any_whitespace=False)


def list_of_calls(marker: str, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
    """Calls as one list of objects behind a marker. None as above."""
    functions = chosen(tools, choice)
    schemas = [schema_of(function) for function in functions]
    if not functions or None in schemas:
        return None
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _moved(schema, f"#/items/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (function, schema) in enumerate(zip(functions, schemas, strict=True))
    ]
    calls = {"type": "array", "items": {"anyOf": items}, "minItems": 1, **({} if parallel else {"maxItems": 1})}
    structure = Structure(begin=marker, schema=calls, end="")
    tag = StructuralTag(structures=(structure,), triggers=(marker,), at_least_one=choice != AUTO, stop_after_first=True)
    return _spec(tag)


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one: references to its own root begin there."""
    if not isinstance(schema, dict):
        return schema
    moved = with_below(schema, partial(_moved, place=place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved
