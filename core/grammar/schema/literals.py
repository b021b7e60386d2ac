"""The values of `const` and `enum` as formulas."""

from __future__ import annotations

from core.grammar.schema.arrays import Array
from core.grammar.schema.formulas import Formula
from core.grammar.schema.numbers import Number
from core.grammar.schema.objects import Object
from core.grammar.schema.shapes import Constant, Shape
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools
from core.grammar.schema.values import Value, is_number, number


def literal(tools: Tools, *values: Value) -> Formula:
    """Exactly these values."""
    found: dict[str, tuple[Shape, ...]] = {}
    simple = [value for value in values if not isinstance(value, list | dict)]
    for kind, constants in (("null", {None}), ("boolean", {True, False})):
        listed = frozenset(value for value in simple if value is None or isinstance(value, bool)) & constants
        if listed:
            found[kind] = (Constant(listed),)
    numbers = frozenset(number(value) for value in simple if is_number(value))
    texts = frozenset(value for value in simple if isinstance(value, str))
    if numbers:
        found["number"] = (Number(only=numbers),)
    if texts:
        found["string"] = (String(only=texts),)
    found["array"] = tuple(_array(tools, value) for value in values if isinstance(value, list))
    found["object"] = tuple(_object(tools, value) for value in values if isinstance(value, dict))
    tools.budget.spend(len(values))
    return tools.formulas.of_shapes(found)


def _array(tools: Tools, value: list[Value]) -> Array:
    items = tuple(literal(tools, item) for item in value)
    return Array(items, tools.formulas.false, len(items), len(items))


def _object(tools: Tools, value: dict[str, Value]) -> Object:
    rules = tuple((String(only=frozenset((name,))), literal(tools, item)) for name, item in value.items())
    others = (String(but=frozenset(value)), tools.formulas.false)
    return Object((*rules, others), tuple(value), order=tuple(value))
