"""Where in a schema other schemas stand. What `const`, `enum`, `default` and the like hold is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

IN_OBJECTS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
"""The values of an object. Those of `dependencies` may be lists of names instead."""
IN_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
IN_PLACE = frozenset(
    (
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip


def below(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What stands directly in `schema` where a schema is due, whatever it is, with the way there."""
    for key, value in schema.items():
        if key in IN_LISTS and isinstance(value, list):
            yield from (((key, str(at)), one) for at, one in enumerate(value))
        elif key in IN_PLACE:
            yield (key,), value
        elif key in IN_OBJECTS and isinstance(value, dict):
            named = value.items()
            yield from (((key, name), one) for name, one in named if key != "dependencies" or not isinstance(one, list))


def with_below(
    schema: Mapping[str, Any], change: Callable[[Any], Any], except_in: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """`schema` with what stands directly in it changed, but not under the keywords of `except_in`. Leaves `schema` alone."""
    found = dict(schema)
    for (keyword, *rest), one in below(schema):
        if keyword in except_in:
            continue
        if not rest:
            found[keyword] = change(one)
            continue
        if found[keyword] is schema[keyword]:
            found[keyword] = schema[keyword].copy()
        inside = found[keyword]
        inside[int(rest[0]) if isinstance(inside, list) else rest[0]] = change(one)
    return found


def escaped(part: str) -> str:
    """As a part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
