"""Rules of EBNF for the values of a JSON schema, in the notation that a format writes values in.

For formats whose calls are no JSON, so that a schema cannot stand in their grammar. Every text of a rule is a value that the
schema accepts; what a rule cannot hold a value to is refused (`UnsupportedError`), never left out. Of an object's properties none
is made up, and they come in the schema's order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core.grammar.schema.words import (
    ARRAY_KEYWORDS,
    CONTAINS_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
)

MAX_DEPTH = 8  # of objects and lists in each other
MAX_RULES = 1000
EMPTY = '""'

# Keywords that a value can fail by: of any kind, or of one. Any other says nothing, by the specification.
_OF_ALL = frozenset(
    (
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "type",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    )
)
_OBJECT = frozenset(("properties", "required", "additionalProperties"))
_OF_KIND: Mapping[str, frozenset[str]] = {
    "string": frozenset(STRING_KEYWORDS),
    "number": frozenset(NUMBER_KEYWORDS),
    "integer": frozenset(NUMBER_KEYWORDS),
    "array": frozenset((*ARRAY_KEYWORDS, *CONTAINS_KEYWORDS, "unevaluatedItems")),
    "object": frozenset(
        (
            *OBJECT_KEYWORDS, "propertyNames", "unevaluatedProperties", "dependencies", "dependentRequired",
            "dependentSchemas",
        )
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip

_STRING = r"""string ::= "\"" ([^"\\BARRED\x00-\x1F] | "\\" ["\\nrt])* "\""
"""
_BASE = r"""
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?
any ::= string | number | boolean | null | list | dict
list ::= "[" (any (", " any)*)? "]"
dict ::= "{" (string ": " any (", " string ": " any)*)? "}"
"""


class UnsupportedError(ValueError):
    """The schema says what a rule cannot."""


class NothingError(UnsupportedError):
    """No value satisfies the schema."""


@dataclass(slots=True)
class Rules:
    """A grammar in the making. `words`: true, false and null as the format writes them; `barred`: what no value has in it."""

    words: Mapping[Any, str]
    barred: str = ""
    _bodies: dict[str, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # by the schema's text

    def text(self, root: str) -> str:
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        lines.append(f"boolean ::= {quoted(self.words[True])} | {quoted(self.words[False])}")
        lines.append(f"null ::= {quoted(self.words[None])}")
        return "\n".join(lines) + _BASE + _STRING.replace("BARRED", self.barred)

    def add(self, body: str) -> str:
        """A new rule; returns its name."""
        if len(self._bodies) >= MAX_RULES:
            raise UnsupportedError("it is too large")
        name = f"r{len(self._bodies)}"
        self._bodies[name] = body
        return name

    def value(self, schema: Any, depth: int = 0) -> str:
        """The rule of the values of a schema. Raises UnsupportedError."""
        if says_nothing(schema):
            return "any"
        if schema is False:
            raise NothingError("it allows nothing")
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise UnsupportedError("it is too deep, or no schema")
        known = json.dumps(schema)
        if known not in self._names:
            self._names[known] = self.add(self._body(schema, depth))
        return self._names[known]

    def members(self, schema: Mapping[str, Any], pair: Callable[[str, Any], str], separator: str) -> str:
        """The rule of an object's members, each written as `pair` says. A property that no value has is left out."""
        properties, required = properties_of(schema)
        pairs = {key: self._possible(pair, key, one, key in required) for key, one in properties.items()}
        between = f"{quoted(separator)} " if separator else ""
        first = after = EMPTY  # the members from this one on: as the first of all, and behind others
        for key in reversed([key for key, written in pairs.items() if written]):
            begun = self.add(f"{pairs[key]} {after}")
            first = begun if key in required else self.add(f"{begun} | {first}")
            after = self.add(f"{between}{begun}" if key in required else f"{between}{begun} | {after}")
        return first

    def literal(self, value: Any) -> str:
        """A value as the format writes it."""
        if value is None or isinstance(value, bool):
            return self.words[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self.literal, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{json.dumps(key)}: {self.literal(item)}' for key, item in value.items())}}}"
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedError("a number is not finite")
        return json.dumps(value, ensure_ascii=False)

    @staticmethod
    def _possible(pair: Callable[[str, Any], str], key: str, schema: Any, is_required: bool) -> str:
        """ "" where an optional property can have no value."""
        try:
            return pair(key, schema)
        except NothingError:
            if is_required:
                raise
            return ""

    def _body(self, schema: Mapping[str, Any], depth: int) -> str:
        values = values_of(schema)
        if values is not None:
            return " | ".join(self._quoted(self.literal(value)) for value in values)
        if "anyOf" in schema:
            check_keywords(schema, "anyOf")
            return self._either([partial(self.value, one, depth + 1) for one in schema["anyOf"]])
        check_keywords(schema, "type", "items", *_OBJECT)
        return self._either([partial(self._of_kind, kind, schema, depth) for kind in kinds_of(schema)])

    @staticmethod
    def _either(options: Sequence[Callable[[], str]]) -> str:
        """Those of which there are values."""
        found = []
        for option in options:
            with suppress(NothingError):
                found.append(option())
        if not found:
            raise NothingError("it allows nothing")
        return " | ".join(found)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind in ("string", "integer", "number", "boolean", "null"):
            return kind
        if kind == "array":
            return self._array(schema.get("items", True), depth)
        if kind != "object":
            raise UnsupportedError(f"there is no type {kind}")
        if schema.get("properties") or schema.get("required"):
            return f'"{{" {self.members(schema, lambda key, one: self._pair(key, one, depth), ", ")} "}}"'
        others = schema.get("additionalProperties", True)
        if others is False:
            return '"{}"'
        pair = f'string ": " {self.value(others, depth + 1)}'
        return f'"{{" ({pair} (", " {pair})*)? "}}"'

    def _array(self, items: Any, depth: int) -> str:
        try:
            item = self.value(items, depth + 1)
        except NothingError:
            return '"[]"'
        return f'"[" ({item} (", " {item})*)? "]"'

    def _pair(self, key: str, schema: Any, depth: int) -> str:
        return f"{self._quoted(json.dumps(key, ensure_ascii=False) + ': ')} {self.value(schema, depth + 1)}"

    def _quoted(self, text: str) -> str:
        if self.barred and self.barred in text:
            raise UnsupportedError(f"a value has {self.barred!r}")
        return quoted(text)


def quoted(text: str) -> str:
    """A text in a rule."""
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    )
    return f'"{escaped}"'


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists. Raises UnsupportedError where it says more of them than their type."""
    if "const" not in schema and "enum" not in schema:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    kinds = kinds_of(schema) if "type" in schema else None
    found = [value for value in values if kinds is None or _is_of(value, kinds)]
    if not found:
        raise NothingError("it allows nothing")
    check_keywords(schema, "const" if "const" in schema else "enum", "type")
    return found


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that its values may have; where it does not say, that which its keywords are about."""
    kinds = schema.get("type") or ("array" if "items" in schema else "object" if _OBJECT & schema.keys() else None)
    found = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
        raise UnsupportedError("it has no type")
    return found


def properties_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties in their order, those that are only required last; and the required ones."""
    properties, required = dict(schema.get("properties") or {}), frozenset(schema.get("required") or ())
    for key in sorted(required - properties.keys()):
        properties[key] = schema.get("additionalProperties", True)
    return properties, required


def check_arguments(schema: Mapping[str, Any]) -> None:
    """Raises UnsupportedError unless the schema of all arguments says no more than their properties."""
    check_keywords(schema, "type", *_OBJECT)


def says_nothing(schema: Any) -> bool:
    """It allows any value."""
    return schema is True or (isinstance(schema, dict) and not _said(schema))


def _is_of(value: Any, kinds: list[str]) -> bool:
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    if isinstance(value, float):
        return "number" in kinds or ("integer" in kinds and value.is_integer())
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return kind in kinds


def check_keywords(schema: Mapping[str, Any], *known: str) -> None:
    """Raises UnsupportedError for any other that says something of the values it is about."""
    unknown = sorted(_said(schema).difference(known))
    if unknown:
        raise UnsupportedError(f"no rule for {', '.join(unknown)}")


def _said(schema: Mapping[str, Any]) -> set[str]:
    """The keywords that a value can fail by: those about other kinds than its type's are left out."""
    kinds = kinds_of(schema) if "type" in schema else _OF_KIND
    about = _OF_ALL.union(*(_OF_KIND.get(kind, ()) for kind in kinds))
    return {keyword for keyword in schema if keyword in about}
