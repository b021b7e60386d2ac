"""Names of types that tools are described with and JSON Schema does not have: those of Python, Java and JavaScript.

Datasets of tools have them (the Berkeley Function-Calling Leaderboard's, most of all), and so have the requests of clients that
pass such tools on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.grammar.schema.places import with_below
from core.grammar.schema.words import TYPES

JSON_TYPES: Mapping[str, str] = {
    "str": "string", "char": "string", "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "float": "number", "double": "number", "bool": "boolean", "dict": "object", "hashmap": "object", "map": "object",
    "list": "array", "tuple": "array", "arraylist": "array", "none": "null",
}  # fmt: skip
FREE = frozenset(("", "any"))
"""They say nothing."""


def with_json_types(schema: Any) -> Any:
    """The same schema with the types that are meant. What is no known name stays, to be refused by who reads it."""
    if not isinstance(schema, dict):
        return schema
    found = with_below(schema, with_json_types)
    if "type" in found:
        _replace_type(found)
    return found


def _replace_type(schema: dict[str, Any]) -> None:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not all(isinstance(name, str) for name in names):
        return
    meant = [_meant(name) for name in names]
    if any(name in FREE for name in meant):
        del schema["type"]
    else:
        schema["type"] = meant if isinstance(schema["type"], list) else meant[0]


def _meant(name: str) -> str:
    if name in TYPES:
        return name
    folded = name.casefold()
    return folded if folded in TYPES or folded in FREE else JSON_TYPES.get(folded, name)
