"""Schemas that lead to themselves with no way out: their values would have no end, and masks would lead into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from core.stages.grammar import GrammarError
from plugins.grammars.json_text import subschemas

_Holds = Callable[[Any], bool]


def refuse_endless(schema: Any) -> None:
    """Raises GrammarError for a part of `schema` that has no finite value because of what it refers to."""
    parts = [one for one in subschemas(schema) if isinstance(one, dict)]
    if not any("$ref" in one for one in parts):
        return
    everything = {id(one) for one in parts}
    for one in parts:
        if "$ref" in one and id(to := target(schema, one["$ref"])) not in everything and isinstance(to, dict):
            raise GrammarError(f"$ref to {one['$ref'][:80]}: there is no schema")
    finite: set[int] = set()
    while found := {id(one) for one in parts if id(one) not in finite and _Finite(schema, finite).holds(one)}:
        finite |= found
    for one in parts:
        if id(one) not in finite and _Finite(schema, everything).holds(one):
            raise GrammarError(f"$ref {_some_ref(one)} leads back to itself with no way out, which is not supported")


def target(schema: Any, reference: Any) -> Any:
    """The schema at a place in `schema`. Raises GrammarError where there is none, or the place is elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise GrammarError(f"$ref to {str(reference)[:80]} is not supported: only to a place in the schema")
    place: Any = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict | bool) or (reference != "#" and not reference.startswith("#/")):
        raise GrammarError(f"$ref to {reference[:80]}: there is no schema")
    return place


class _Finite:
    """Whether a schema has a finite value where those in `known` have one."""

    def __init__(self, root: Any, known: set[int]):
        self._root = root
        self._known = known

    def holds(self, schema: Mapping[str, Any]) -> bool:
        if "$ref" in schema and not self._is_known(target(self._root, schema["$ref"])):
            return False
        for keyword, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            options = schema.get(keyword)
            if isinstance(options, list) and options and not enough(self._is_known(one) for one in options):
                return False
        if schema.get("type") in ("object", ["object"]):
            properties = schema.get("properties", {})
            return all(self._is_known(properties.get(name, True)) for name in schema.get("required", ()))
        if schema.get("type") in ("array", ["array"]):
            return all(self._is_known(one) for one in _needed(schema))
        return True

    def _is_known(self, schema: Any) -> bool:
        return schema is not False if not isinstance(schema, dict) else id(schema) in self._known


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas of items that must be there."""
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed = list(first[: int(least)])
    return [*needed, schema.get("items", True)] if least > len(first) else needed


def _some_ref(schema: Mapping[str, Any]) -> str:
    return next((str(one["$ref"])[:80] for one in subschemas(schema) if isinstance(one, dict) and "$ref" in one), "#")
