"""JSON values as JSON Schema compares them: 1 and 1.0 are one number, true is none, the order of keys is nothing."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

from core.stages.grammar import GrammarError

Value: TypeAlias = Any
"""What `json.loads` returns."""

Key: TypeAlias = tuple[Any, ...]
"""Equal for equal values, and hashable."""


def number(value: float) -> Fraction:
    """Exactly what the text of the number says, as far as a float has kept it."""
    if isinstance(value, int):
        return Fraction(value)
    if not math.isfinite(value):
        raise GrammarError(f"{value} is no number of JSON")
    return Fraction(Decimal(repr(value)))


def is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def key_of(value: Value) -> Key:
    if isinstance(value, bool) or value is None:
        return ("constant", str(value))
    if is_number(value):
        return ("number", number(value))
    if isinstance(value, str):
        return ("string", value)
    if isinstance(value, list):
        return ("array", *map(key_of, value))
    return ("object", *sorted((name, key_of(item)) for name, item in value.items()))


def as_json(value: Fraction) -> int | float | None:
    """The number as `json.dumps` writes it exactly; None where no int or float is it."""
    if value.denominator == 1:
        return value.numerator
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and number(found) == value else None
