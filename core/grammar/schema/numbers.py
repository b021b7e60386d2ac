"""Sets of numbers: intervals, multiples and their holes, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

ONE = Fraction(1)
MAX_LISTED = 1024
MAX_HOLES = 64


@dataclass(frozen=True, slots=True)
class Number:
    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    step: Fraction | None = None  # multiples of it alone; 1: integers
    no_steps: frozenset[Fraction] = frozenset()  # no multiples of these
    only: frozenset[Fraction] | None = None  # the values, where they are few: then the other fields say nothing
    but: frozenset[Fraction] = frozenset()  # none of these

    def accepts(self, value: Fraction) -> bool:
        if self.only is not None:
            return value in self.only
        if value in self.but or (self.step is not None and value % self.step):
            return False
        if any(value % step == 0 for step in self.no_steps):
            return False
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        return above and (self.high is None or value < self.high or (value == self.high and not self.high_open))


ANY = Number()
INTEGER = Number(step=ONE)


def intersection(a: Number, b: Number) -> Number | None:
    if a.only is not None or b.only is not None:
        listed, other = (a, b) if a.only is not None else (b, a)
        values = frozenset(filter(other.accepts, listed.only or ()))
        return Number(only=values) if values else None
    low, low_open = _tighter(a.low, a.low_open, b.low, b.low_open, lower=True)
    high, high_open = _tighter(a.high, a.high_open, b.high, b.high_open, lower=False)
    step = _common_step(a.step, b.step)
    return tidy(Number(low, high, low_open, high_open, step, a.no_steps | b.no_steps, None, a.but | b.but))


def _tighter(
    a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, *, lower: bool
) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a > b) == lower else (b, b_open)


def _common_step(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return b if a is None else a
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))


def tidy(shape: Number) -> Number | None:
    """Bounds on multiples where there is a step; the value itself where there is one; None where there is none."""
    low, high, step = shape.low, shape.high, shape.step
    if step is not None:
        if any(step % other == 0 for other in shape.no_steps):
            return None
        if low is not None:
            low = step * (math.floor(low / step) + 1 if shape.low_open else math.ceil(low / step))
        if high is not None:
            high = step * (math.ceil(high / step) - 1 if shape.high_open else math.floor(high / step))
        shape = replace(shape, low=low, high=high, low_open=False, high_open=False)
    if low is None or high is None:
        return shape
    if low > high or (low == high and (shape.low_open or shape.high_open)):
        return None
    if low == high:
        return Number(only=frozenset((low,))) if shape.accepts(low) else None
    return shape


def complement(shape: Number) -> tuple[Number, ...]:
    if shape.only is not None:
        return (Number(but=shape.only),)
    found = [Number(only=shape.but)] if shape.but else []
    if shape.low is not None:
        found.append(Number(high=shape.low, high_open=not shape.low_open))
    if shape.high is not None:
        found.append(Number(low=shape.high, low_open=not shape.high_open))
    if shape.step is not None:
        found.append(Number(no_steps=frozenset((shape.step,))))
    return (*found, *(Number(step=step) for step in sorted(shape.no_steps)))


def listed(shape: Number) -> frozenset[Fraction] | None:
    """The values, where there are at most MAX_LISTED."""
    if shape.only is not None:
        return shape.only
    if shape.step is None or shape.low is None or shape.high is None:
        return None
    count = (shape.high - shape.low) / shape.step + 1
    if count > MAX_LISTED:
        return None
    return frozenset(filter(shape.accepts, (shape.low + shape.step * at for at in range(int(count)))))


def without_holes(shape: Number) -> list[Number] | None:
    """The same numbers as intervals without `but` and `no_steps`; None where there are too many holes."""
    whole = replace(shape, but=frozenset(), no_steps=frozenset())
    holes = set(shape.but)
    for step in shape.no_steps:
        between = intersection(whole, Number(step=step))
        multiples = listed(between) if between is not None else frozenset[Fraction]()
        if multiples is None:
            return None
        holes |= multiples
    holes = {value for value in holes if whole.accepts(value)}
    return _intervals(whole, sorted(holes)) if len(holes) <= MAX_HOLES else None


def _intervals(rest: Number, holes: list[Fraction]) -> list[Number]:
    parts = list[Number]()
    for hole in holes:
        below = tidy(replace(rest, high=hole, high_open=True))
        parts += [below] if below else []
        above = tidy(replace(rest, low=hole, low_open=True))
        if above is None:
            return parts
        rest = above
    return [*parts, rest]
