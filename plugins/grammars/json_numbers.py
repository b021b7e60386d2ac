"""Numbers of JSON as rules, and their bounds as llguidance reads them right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
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

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_MAX_PLACES = 22  # 10**22 is the last power that a float is
_NUM_DIGITS = 15  # of a decimal that a float keeps, whatever they are
_DECADES = tuple(float(f"1e-{places}") for places in range(50, 300, 50))
"""llguidance nests a group for each zero after the point of a lower bound, and a regular expression may have 250 levels."""
_LEAST = 1e-290  # so far from what is no normal float that reading it costs no digits
_MAX_COEFFICIENT = 2**32 - 1  # of a multiple, to llguidance


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


def for_llguidance(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with its own numbers, but not those inside it, as llguidance 1.9 does them right. Raises GrammarError.

    It takes a whole bound that is excluded for included where both bounds have the same whole part: of (0, 0.5] it lets 0 out.
    It leaves out the decimals that a bound begins with, like 0.2 in [0, 0.25] and 0.5 in [0.5, 0.55], and multiples with fewer
    places than `multipleOf` has. So a number becomes `anyOf` intervals in which nothing is amiss. And it reads numbers of many
    digits as their neighbours: bounds like that are tightened to the next number of 15 digits, constants refused.
    """
    if _is_misread([schema.get("enum"), schema.get("const")]):
        raise GrammarError("constants with so many digits are not supported")
    if schema.get("type") != "number" or not any(keyword in schema for keyword in (*_BOUNDS, "multipleOf")):
        return schema
    kept = {keyword: says for keyword, says in schema.items() if keyword not in {"type", "multipleOf", *_BOUNDS}}
    pieces = list(_pieces(_interval(schema), _finite(schema.get("multipleOf"))))
    if not pieces:
        raise GrammarError("bounds that are so close to each other are not supported")
    return {**kept, **(pieces[0] if len(pieces) == 1 else {"anyOf": pieces})}


def _is_misread(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_misread, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not _is_read_right(Decimal(str(value)))


def _is_read_right(value: Decimal) -> bool:
    """llguidance's reader rounds the digits to a float, and divides it by one that is a power of 10: one of the two must be
    exact for the result to be the nearest float."""
    digits, places = _coefficient(value)
    return float(digits) == digits and abs(places) <= _MAX_PLACES


def _coefficient(value: Decimal) -> tuple[int, int]:
    """An integer, and how many of its digits stand after the point."""
    _, digits, exponent = value.normalize().as_tuple()
    return int("".join(map(str, digits))), -int(exponent)


@dataclass(frozen=True, slots=True)
class _Interval:
    low: float | None
    high: float | None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        return above and (self.high is None or value < self.high or (value == self.high and not self.high_open))

    def cut(self, cuts: Iterable[float]) -> Iterator[_Interval]:
        """From each cut, which is in the interval, to the next; both have the cut itself."""
        low, low_open = self.low, self.low_open
        for at in cuts:
            yield _Interval(low, at, low_open)
            low, low_open = at, False
        last = _Interval(low, self.high, low_open, self.high_open)
        if last.low is None or last.high is None or last.low < last.high or last.holds(last.low):
            yield last

    def says(self) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.low_open else "minimum": self.low}
        high = {"exclusiveMaximum" if self.high_open else "maximum": self.high}
        return {"type": "number", **{keyword: bound for keyword, bound in {**low, **high}.items() if bound is not None}}


def _interval(schema: Mapping[str, Any]) -> _Interval:
    """With bounds that llguidance reads and writes right."""
    least, above, most, below = (_finite(schema.get(keyword)) for keyword in _BOUNDS)
    low_open = above is not None and (least is None or above >= least)
    high_open = below is not None and (most is None or below <= most)
    low, low_open = _inner(above if low_open else least, low_open, ROUND_CEILING)
    high, high_open = _inner(below if high_open else most, high_open, ROUND_FLOOR)
    if low is None or high is None:
        return _Interval(low, high, low_open, high_open)
    if low_open and low >= 0 and low % 1 == 0 and high < low + 1:
        low, low_open = _next(low, ROUND_CEILING), False
    if high_open and high <= 0 and high % 1 == 0 and low > high - 1:
        high, high_open = _next(high, ROUND_FLOOR), False
    return _Interval(low, high, low_open, high_open)


def _inner(bound: float | None, is_open: bool, inwards: str) -> tuple[float | None, bool]:
    """With whether it is excluded: `bound`, or where it would be misread the next number that is not, or not by so much that it
    were outside."""
    if bound is None or isinstance(bound, int) or _is_read_right(Decimal(str(bound))):
        return bound, is_open
    if abs(bound) < _LEAST:
        if (bound > 0) == (inwards == ROUND_FLOOR):
            raise GrammarError(f"a bound like {bound:g} is not supported")
        return math.copysign(_LEAST, bound), False
    shorter = Context(prec=_NUM_DIGITS, rounding=inwards).plus(Decimal(str(bound)))
    return (float(shorter) if _is_read_right(shorter) else _next(float(shorter), inwards)), False


def _next(value: float, inwards: str) -> float:
    """Of 15 digits."""
    if not value:
        return _LEAST if inwards == ROUND_CEILING else -_LEAST
    exact, context = Decimal(str(value)), Context(prec=_NUM_DIGITS)
    return float(context.next_plus(exact) if inwards == ROUND_CEILING else context.next_minus(exact))


def _pieces(interval: _Interval, step: float | None) -> Iterator[dict[str, Any]]:
    cuts = sorted({cut for cut in _cuts(interval) if interval.holds(cut)})
    steps = [{"multipleOf": one} for one in _steps(step)] if step is not None else [{}]
    inside = (cut for cut in cuts if cut not in (interval.low, interval.high))
    yield from ({**piece.says(), **one} for piece in interval.cut(inside) for one in steps)
    for point in (cut for cut in cuts if cut in (interval.low, interval.high, 0)):
        if step is None or Fraction(str(point)) % Fraction(str(step)) == 0:
            yield _point(point)


def _cuts(interval: _Interval) -> Iterator[float]:
    """Where llguidance leaves something out: what the bounds that are farther from 0 begin with, and 0 as the last number."""
    low, high = interval.low, interval.high
    if high is not None:
        yield from _beginnings(high) if high >= 0 else (-decade for decade in _DECADES)
    if low is not None and low != 0:
        yield from _beginnings(low) if low < 0 else _DECADES


def _beginnings(bound: float) -> Iterator[float]:
    """With one digit after the point, with two, and so on, but not all of them; 0 of 0."""
    if not bound:
        yield 0
    exact = Decimal(str(bound))
    for places in range(1, _coefficient(exact)[1]):
        yield float(exact.quantize(Decimal(1).scaleb(-places), ROUND_DOWN)) or 0  # no -0.0


def _steps(step: float) -> Iterator[float]:
    """`step`, and what its multiples with fewer places are multiples of."""
    yield step
    exact = Fraction(str(step))
    for places in range(1, _coefficient(Decimal(str(step)))[1]):
        shorter = float(Fraction(exact.numerator, math.gcd(exact.denominator, 10**places)))
        if _is_kept(shorter):
            yield shorter


def _is_kept(step: float) -> bool:
    """llguidance finds its digits by multiplying it with 10."""
    while step % 1 and step <= _MAX_COEFFICIENT:
        step *= 10
    return step <= _MAX_COEFFICIENT


def _point(value: float) -> dict[str, Any]:
    """One number alone; a whole one with .0 too, which llguidance does not take for a constant."""
    if value % 1:
        return {"enum": [value]}
    if value < 0:
        return {"type": "number", "exclusiveMinimum": value - 0.5, "maximum": value, "multipleOf": 0.5}
    return {"type": "number", "minimum": value, "exclusiveMaximum": value + 0.5, "multipleOf": 0.5}
