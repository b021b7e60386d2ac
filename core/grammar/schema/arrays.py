"""Sets of arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.grammar.schema.formulas import Formula
from core.grammar.schema.tools import Tools


@dataclass(frozen=True, slots=True)
class Contains:
    """How many of the items from `start` on satisfy `formula`."""

    start: int
    formula: Formula
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Array:
    prefix: tuple[Formula, ...]
    rest: Formula  # of all items after those of `prefix`
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool | None = None  # False: two items at least are equal
    where: str = field(default="", compare=False)  # the schema that it comes from, for messages

    def item(self, at: int) -> Formula:
        return self.prefix[at] if at < len(self.prefix) else self.rest


def intersection(a: Array, b: Array, tools: Tools) -> Array | None:
    if a.unique is not None and b.unique is not None and a.unique != b.unique:
        return None
    both = tools.formulas.all_of
    length = max(len(a.prefix), len(b.prefix))
    highs = [high for high in (a.high, b.high) if high is not None]
    contains = tuple(dict.fromkeys((*a.contains, *b.contains)))
    unique = b.unique if a.unique is None else a.unique
    prefix = tuple(both(a.item(at), b.item(at)) for at in range(length))
    rest, where = both(a.rest, b.rest), a.where or b.where
    return tidy(
        Array(prefix, rest, max(a.low, b.low), min(highs, default=None), contains, unique, where), tools, (a, b)
    )


def tidy(shape: Array, tools: Tools, made_of: tuple[Array, ...] = ()) -> Array | None:
    """None where no array is in it."""
    high = shape.high
    for at in range(len(shape.prefix) + 1):
        if (high is None or at < high) and _is_impossible(shape.item(at), at, tools, made_of):
            high = at
    shape = replace(shape, high=high)
    if any(one.low and one.formula is tools.formulas.false for one in shape.contains):
        return None
    return None if high is not None and shape.low > high else shape


def _is_impossible(item: Formula, at: int, tools: Tools, made_of: tuple[Array, ...]) -> bool:
    """Looks closer at what no array had that `shape` is made of."""
    if any(item is one.item(at) for one in made_of):
        return item is tools.formulas.false
    return tools.is_empty(item)


def complement(shape: Array, tools: Tools) -> tuple[Array, ...]:
    true, negated = tools.formulas.true, tools.formulas.negated
    free = Array((), true, where=shape.where)
    found = [replace(free, high=shape.low - 1)] if shape.low else []
    if shape.high is not None:
        found.append(replace(free, low=shape.high + 1))
    for at, item in enumerate(shape.prefix):
        if item is not true:
            found.append(replace(free, prefix=(true,) * at + (negated(item),), low=at + 1))
    if shape.rest is not true:
        found.append(containing(free, Contains(len(shape.prefix), negated(shape.rest), 1, None), tools))
    for one in shape.contains:
        if one.low:
            found.append(containing(free, replace(one, low=0, high=one.low - 1), tools))
        if one.high is not None:
            found.append(containing(free, replace(one, low=one.high + 1, high=None), tools))
    return (*found, replace(free, unique=not shape.unique)) if shape.unique is not None else tuple(found)


def containing(shape: Array, one: Contains, tools: Tools) -> Array:
    """`shape`, with `one` said in the simplest way."""
    if one.high is not None and one.low > one.high:
        return replace(shape, low=1, high=0)  # no array
    if one.formula is tools.formulas.true:
        low = max(shape.low, one.start + one.low) if one.low else shape.low
        highs = [high for high in (shape.high, None if one.high is None else one.start + one.high) if high is not None]
        return replace(shape, low=low, high=min(highs, default=None))
    if one.high == 0:
        never = tools.formulas.negated(one.formula)
        prefix = shape.prefix + (shape.rest,) * (one.start - len(shape.prefix))
        both = tools.formulas.all_of
        items = tuple(both(item, never) if at >= one.start else item for at, item in enumerate(prefix))
        return replace(shape, prefix=items, rest=both(shape.rest, never))
    if one.low == 0 and one.high is None:
        return shape
    return replace(shape, contains=(*shape.contains, one))
