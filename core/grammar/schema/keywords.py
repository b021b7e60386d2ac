"""What the keywords of one schema say, as formulas: each about the kinds of values that it is about, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from core.grammar.schema import arrays, numbers, objects, strings
from core.grammar.schema.arrays import Array, Contains
from core.grammar.schema.ecma import language
from core.grammar.schema.formats import FORMATS, WITHOUT_PATTERN
from core.grammar.schema.formulas import Formula
from core.grammar.schema.languages import Language
from core.grammar.schema.limits import malformed, refuse
from core.grammar.schema.numbers import Number
from core.grammar.schema.objects import Object
from core.grammar.schema.references import Location
from core.grammar.schema.shapes import BOOLEAN, NULL, Shape, Shapes
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools
from core.grammar.schema.values import is_number, number
from core.grammar.schema.words import TYPES
from core.stages.grammar import GrammarError

Formats = Literal["annotation", "known", "assertion"]
"""Whether `format` is checked: never, where there is a pattern for it, or always, so that other formats are refused."""

DIALECTS = re.compile(r"https?://json-schema\.org/")


@dataclass(frozen=True, slots=True)
class Schema:
    """One schema object, with access to what its keywords hold."""

    location: Location
    tools: Tools
    formula_at: Callable[..., Formula]  # (location, schema, *path): the formula of a schema inside this one

    @property
    def raw(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.location.schema
        return found

    @property
    def where(self) -> str:
        return self.location.pointer

    def formula(self, schema: Any, *path: str) -> Formula:
        if not isinstance(schema, dict | bool):
            malformed("/".join(path), self.where, "a schema")
        return self.formula_at(self.location, schema, *path)

    def count(self, keyword: str) -> int | None:
        if keyword not in self.raw:
            return None
        value = self.raw[keyword]
        if not is_number(value) or value < 0 or not float(value).is_integer():
            malformed(keyword, self.where, "a whole number, 0 or more")
        return int(value)

    def number(self, keyword: str) -> Fraction | None:
        if keyword not in self.raw or (keyword.startswith("exclusive") and self.raw[keyword] is False):
            return None
        value = self.raw[keyword]
        if not is_number(value):
            malformed(keyword, self.where, "a number")
        return number(value)

    def mapping(self, keyword: str) -> Mapping[str, Any]:
        value = self.raw.get(keyword, {})
        if not isinstance(value, dict):
            malformed(keyword, self.where, "an object")
        return value

    def listed(self, keyword: str) -> Sequence[Any]:
        value = self.raw.get(keyword, [])
        if not isinstance(value, list):
            malformed(keyword, self.where, "a list")
        return value

    def names(self, keyword: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            malformed(keyword, self.where, "a list of names")
        return tuple(dict.fromkeys(value))

    def pattern(self, keyword: str, value: Any) -> Language:
        if not isinstance(value, str):
            malformed(keyword, self.where, "a regular expression")
        try:
            return language(self.tools.languages, value)
        except GrammarError as error:
            raise GrammarError(f"{keyword} at {self.where}: {error}") from None


def asserted(schema: Schema, formats: Formats) -> Shapes:
    """What the keywords say that are about one kind each, and `type`."""
    found: dict[str, tuple[Shape, ...]] = {}
    for name in _types(schema):
        if name == "null":
            found[name] = (NULL,)
        elif name == "boolean":
            found[name] = (BOOLEAN,)
        elif name in ("number", "integer"):
            found["number"] = _number(schema, name == "integer", found.get("number", ()))
        elif name == "string":
            found[name] = _string(schema, formats)
        elif name == "array":
            found[name] = _array(schema)
        else:
            found[name] = _object(schema)
    return found


def _types(schema: Schema) -> tuple[str, ...]:
    if "type" not in schema.raw:
        return TYPES[:-1]
    value = schema.raw["type"]
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        malformed("type", schema.where, f"one or more of {', '.join(TYPES)}")
    return tuple(dict.fromkeys(names))


def _number(schema: Schema, is_integer: bool, known: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """An integer is a number too: with both types, it says nothing."""
    step = schema.number("multipleOf")
    if step is not None and step <= 0:
        malformed("multipleOf", schema.where, "a number above 0")
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum")
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum")
    shape: Number | None = numbers.tidy(Number(low, high, low_open, high_open, step))
    if shape is None or not is_integer:
        return () if shape is None else (shape,)
    integers = numbers.intersection(shape, numbers.INTEGER)
    return known or (() if integers is None else (integers,))


def _bound(schema: Schema, closed: str, opened: str) -> tuple[Fraction | None, bool]:
    """Draft 4 has a boolean for `opened`, which says how `closed` is meant."""
    bound = schema.number(closed)
    if schema.raw.get(opened) is True:
        return bound, True
    other = schema.number(opened)
    if bound is None or other is None:
        return (other, True) if bound is None else (bound, False)
    is_tighter = other >= bound if closed == "minimum" else other <= bound
    return (other, True) if is_tighter else (bound, False)


def _string(schema: Schema, formats: Formats) -> tuple[Shape, ...]:
    low, high = schema.count("minLength") or 0, schema.count("maxLength")
    shape: String | None = String(low, high)
    if "pattern" in schema.raw:
        pattern = schema.pattern("pattern", schema.raw["pattern"])
        shape = strings.intersection(String(low, high), String(language=pattern), schema.tools)
    if shape is not None:
        shape = replace(shape, formats=_formats(schema, formats))
    return () if shape is None or (high is not None and low > high) else (shape,)


def _formats(schema: Schema, formats: Formats) -> frozenset[str]:
    name = schema.raw.get("format")
    if formats == "annotation" or not isinstance(name, str):
        return frozenset()
    if formats == "assertion" and name in WITHOUT_PATTERN:
        refuse("format", schema.where, name)
    return frozenset((name,)) if name in FORMATS else frozenset()


def _array(schema: Schema) -> tuple[Shape, ...]:
    raw, true = schema.raw, schema.tools.formulas.true
    items, rest = raw.get("items", True), raw.get("items", True)
    prefix_of = "prefixItems"
    if isinstance(items, list):  # as drafts before 2020-12 write it
        prefix_of, rest = "items", raw.get("additionalItems", True)
    prefix = tuple(schema.formula(one, prefix_of, str(at)) for at, one in enumerate(schema.listed(prefix_of)))
    shape = Array(
        prefix=prefix,
        rest=true if rest is True else schema.formula(rest, "items" if prefix_of != "items" else "additionalItems"),
        low=schema.count("minItems") or 0,
        high=schema.count("maxItems"),
        unique=True if raw.get("uniqueItems") is True else None,
        where=schema.where,
    )
    found = arrays.tidy(shape, schema.tools, (shape,))
    return () if found is None else (found,)


def contains(schema: Schema) -> Contains:
    low, high = schema.count("minContains"), schema.count("maxContains")
    return Contains(0, schema.formula(schema.raw["contains"], "contains"), 1 if low is None else low, high)


def _object(schema: Schema) -> tuple[Shape, ...]:
    raw, rules = schema.raw, list[objects.Rule]()
    named, patterns = schema.mapping("properties"), schema.mapping("patternProperties")
    for name, one in named.items():
        rules.append((String(only=frozenset((name,))), schema.formula(one, "properties", name)))
    languages = [schema.pattern("patternProperties", pattern) for pattern in patterns]
    for pattern, names in zip(patterns, languages, strict=True):
        rules.append((String(language=names), schema.formula(patterns[pattern], "patternProperties", pattern)))
    if raw.get("additionalProperties", True) is not True:
        others = other_names(named, languages, schema.tools)
        rules.append((others, schema.formula(raw["additionalProperties"], "additionalProperties")))
    required = schema.names("required", raw.get("required", []))
    shape = Object(
        rules=tuple(rules),
        required=required,
        low=schema.count("minProperties") or 0,
        high=schema.count("maxProperties"),
        order=tuple(dict.fromkeys((*named, *required))),
        where=schema.where,
    )
    return () if shape.high is not None and max(len(required), shape.low) > shape.high else (shape,)


def other_names(named: Mapping[str, Any] | frozenset[str], languages: Sequence[Language], tools: Tools) -> String:
    """Names that are none of `named` and in none of `languages`."""
    outside = [tools.languages.complement(one) for one in languages]
    return String(but=frozenset(named), language=tools.languages.both(*outside) if outside else None)


def with_names(shape: Object, names: Sequence[String], tools: Tools) -> Object:
    """`shape` without properties that have a name in one of `names`."""
    return replace(shape, rules=(*shape.rules, *((one, tools.formulas.false) for one in names)))


def refuse_other_dialects(schema: Schema) -> None:
    """What means something in them, and nothing in draft 2020-12."""
    dialect = schema.raw.get("$schema", "")
    if dialect and not (isinstance(dialect, str) and DIALECTS.match(dialect)):
        refuse("$schema", schema.where, "it names none of json-schema.org; leave it out")
    if "$recursiveRef" in schema.raw:
        refuse("$recursiveRef", schema.where, "write $dynamicRef")
