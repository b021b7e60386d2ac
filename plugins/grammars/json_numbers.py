"""Numbers of JSON as rules."""

from __future__ import annotations

import math
from typing import Any

from core.stages.grammar import GrammarError
from plugins.grammars.rules import EMPTY, NOTHING, Expr, Repeat, Text, alt, chars, seq

DIGIT = chars([(0x30, 0x39)])
_FIRST = chars([(0x31, 0x39)])
_SIGN = alt([Text("-"), EMPTY])
_WHOLE = alt([Text("0"), seq([_FIRST, Repeat(DIGIT, 0, None)])])
_DIGITS = Repeat(DIGIT, 1, None)
_POWER = seq([alt([Text("e"), Text("E")]), alt([Text("+"), Text("-"), EMPTY]), _DIGITS])
INTEGER = seq([_SIGN, _WHOLE])
NUMBER = seq([_SIGN, _WHOLE, alt([seq([Text("."), _DIGITS]), EMPTY]), alt([_POWER, EMPTY])])


def integers(minimum: Any, above: Any, maximum: Any, below: Any) -> Expr:
    """Whole numbers between bounds, each of which may be None; `above` and `below` are not among them."""
    lows = [bound for bound in (_up(minimum), _over(above)) if bound is not None]
    highs = [bound for bound in (_down(maximum), _under(below)) if bound is not None]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        return NOTHING
    positive = _from(max(low or 0, 0), high) if high is None or high >= 0 else NOTHING
    if low is not None and low >= 0:
        return positive
    least = max(1, -high) if high is not None and high < 0 else 1
    return alt([positive, seq([Text("-"), _from(least, None if low is None else -low)])])


def _finite(bound: Any) -> int | float | None:
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
        raise GrammarError("a bound needs a number")
    return bound


def _up(bound: Any) -> int | None:
    return None if (value := _finite(bound)) is None else math.ceil(value)


def _down(bound: Any) -> int | None:
    return None if (value := _finite(bound)) is None else math.floor(value)


def _over(bound: Any) -> int | None:
    return None if (value := _finite(bound)) is None else math.floor(value) + 1


def _under(bound: Any) -> int | None:
    return None if (value := _finite(bound)) is None else math.ceil(value) - 1


def _from(low: int, high: int | None) -> Expr:
    """0 <= low. By the number of digits."""
    if high is not None and high < low:
        return NOTHING
    size = len(str(low))
    if high is None:
        return alt([_between(str(low), "9" * size), seq([_FIRST, Repeat(DIGIT, size, None)])])
    lengths = range(size, len(str(high)) + 1)
    ends = [(max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10**n - 1)) for n in lengths]
    return alt([_between(str(first), str(last)) for first, last in ends])


def _between(low: str, high: str) -> Expr:
    """Of the same length, `low` no higher than `high`."""
    if not low:
        return EMPTY
    rest, first, last = len(low) - 1, ord(low[0]), ord(high[0])
    if first == last:
        return seq([Text(low[0]), _between(low[1:], high[1:])])
    options: list[Expr] = []
    if low[1:].strip("0"):
        options.append(seq([Text(low[0]), _between(low[1:], "9" * rest)]))
        first += 1
    tail: list[Expr] = []
    if high[1:].strip("9"):
        tail.append(seq([Text(high[0]), _between("0" * rest, high[1:])]))
        last -= 1
    if first <= last:
        options.append(seq([chars([(first, last)]), Repeat(DIGIT, rest, rest) if rest else EMPTY]))
    return alt([*options, *tail])
