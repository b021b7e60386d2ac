"""JSON schemas as the backends get them: parsed, and held against what a backend enforces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from core.grammar.schema.places import below
from core.grammar.schema.reading import KEYWORDS
from core.stages.grammar import SCHEMA_KEYWORDS, GrammarError
from plugins.grammars.rules import MAX_DEPTH

COMMON_KEYWORDS = frozenset(("type", "enum", "const", "anyOf", "$ref")).union(*SCHEMA_KEYWORDS.values()) - {
    "allOf",
    "multipleOf",
}
"""What all backends enforce."""


def parsed_schema(source: str) -> Any:
    """Raises GrammarError for what is no JSON schema."""
    try:
        schema = json.loads(source, parse_constant=_no_constant)
        json.dumps(schema, ensure_ascii=False).encode()
    except RecursionError as error:
        raise GrammarError("the schema has too many levels") from error
    except ValueError as error:  # or half of a surrogate pair, which no text has
        raise GrammarError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema is an object, true or false, not {type(schema).__name__}")
    return schema


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def refuse_unenforced(schema: Any, enforced: frozenset[str]) -> None:
    """Raises GrammarError that names the first keyword which says something and is not in `enforced`.

    A name that no draft knows says nothing: it is an annotation, by the specification.
    """
    for one in subschemas(schema):
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise GrammarError(f"a schema is an object, true or false, not {json.dumps(one)[:80]}")
        for keyword in one:
            if keyword in KEYWORDS and keyword not in enforced:
                raise GrammarError(f"{keyword} is not supported")
        _refuse_counted_names(one)


def _refuse_counted_names(schema: dict[str, Any]) -> None:
    """A name that stands twice counts once, and no backend sees that it does. Those that are required, and one more, cannot be
    the same."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int | float) and isinstance(required, list) and least > 1 + len(set(map(str, required))):
        raise GrammarError("minProperties so far above the number of required properties is not supported")


def escapes_are_safe(schema: Any) -> bool:
    """No object has names of its own beside other ones, whose escaped forms would have to be told apart."""
    objects = (one for one in subschemas(schema) if isinstance(one, dict))
    return not any(_tells_names_apart(one) or _is_merged(one) for one in objects)


def _tells_names_apart(schema: dict[str, Any]) -> bool:
    if "patternProperties" in schema:
        return True
    return ("properties" in schema or "required" in schema) and schema.get("additionalProperties", True) is not False


def _is_merged(schema: dict[str, Any]) -> bool:
    """With what stands beside it: names of one part are others to the other."""
    return ("allOf" in schema or "$ref" in schema) and len(schema.keys() & KEYWORDS) > 1


def subschemas(schema: Any) -> Iterator[Any]:
    """`schema` and all in it, each with its levels counted. Raises GrammarError for more than MAX_DEPTH levels."""
    todo: list[tuple[Any, int]] = [(schema, 0)]
    while todo:
        one, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema has more than {MAX_DEPTH} levels")
        yield one
        if isinstance(one, dict):
            todo += [(inner, depth + 1) for _, inner in below(one)]
