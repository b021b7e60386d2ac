"""Whether a JSON schema is written as one, whatever it means: in linear time, for schemas that nothing compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from core.errors import near_matches
from core.grammar.schema.limits import malformed
from core.grammar.schema.places import IN_LISTS, IN_OBJECTS, below, escaped
from core.grammar.schema.values import is_number
from core.grammar.schema.words import TYPES
from core.stages.grammar import GrammarError


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0


def _is_limit(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)  # in draft 4, a boolean beside the limit


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(IN_OBJECTS, (lambda value: isinstance(value, dict), "an object")),
    **dict.fromkeys(IN_LISTS - {"items"}, (_is_list, "a list")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(("minProperties", "maxProperties"), (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_limit, "a number")),
    **dict.fromkeys(("pattern", "$ref"), (_is_text, "a text")),
    "required": (_are_names, "a list of names"),
    "enum": (_is_list, "a list"),
}


def check_form(schema: Any) -> None:
    """Raises GrammarError, which names the keyword and a JSON pointer to it. What backends support is not asked."""
    for where, one in _with_places(schema):
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise GrammarError(f"{where} must be a schema: an object, true or false")
        _check_type(one, where)
        for keyword, (is_right, must) in _FORMS.items():
            if keyword in one and not is_right(one[keyword]):
                malformed(keyword, where, must)


def _with_places(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every schema of a document, with the JSON pointer to it."""
    left = [("#", schema)]
    while left:
        where, one = left.pop()
        yield where, one
        if isinstance(one, dict):
            inside = [("/".join((where, *map(escaped, path))), schema) for path, schema in below(one)]
            left += reversed(inside)


def _check_type(schema: Mapping[str, Any], where: str) -> None:
    if "type" not in schema:
        return
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            hint = near_matches(name, TYPES) if isinstance(name, str) else f"; choose one of: {', '.join(TYPES)}"
            raise GrammarError(f"type at {where}: {str(name)[:64]!a} is no type{hint}")
    if not names:
        malformed("type", where, f"one or more of {', '.join(TYPES)}")
