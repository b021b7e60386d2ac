"""Arrays without `contains` and `uniqueItems`: cases in which each item has its own schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from core.grammar.schema import numbers
from core.grammar.schema.arrays import Array, Contains
from core.grammar.schema.formulas import Formula
from core.grammar.schema.limits import refuse
from core.grammar.schema.literals import literal
from core.grammar.schema.numbers import Number
from core.grammar.schema.shapes import Constant, Shape
from core.grammar.schema.solver import Solver
from core.grammar.schema.strings import String
from core.grammar.schema.values import as_json, key_of

MAX_LENGTH = 16  # of arrays whose items are looked at one by one
WINDOW = 8
"""Where any number of items may follow each other that match `contains` or do not: those that count are among the first ones.
No schema without `contains` says that they are anywhere. This leaves arrays out, and lets none in."""
MAX_VALUES = 64  # of an item


@dataclass(frozen=True, slots=True)
class ArrayForm:
    prefix: tuple[Formula, ...]
    rest: Formula
    low: int
    high: int | None


def array_forms(shape: Array, solver: Solver) -> list[ArrayForm]:
    shapes = [shape]
    for one in shape.contains:
        cases = (case for left in shapes for case in _counted(replace(left, contains=()), one, solver))
        shapes = list(solver.tools.bounded(cases, f"contains at {shape.where or '#'}"))
    found = []
    for case in shapes:
        found += [case] if case.unique is None else _distinct(case, solver)
    return [_form(case, solver) for case in found if case.high is None or case.low <= case.high]


def _form(shape: Array, solver: Solver) -> ArrayForm:
    prefix, rest = shape.prefix, shape.rest
    if shape.high is not None and shape.high <= len(prefix):
        prefix, rest = prefix[: shape.high], solver.formulas.false
    while prefix and prefix[-1] is rest and shape.high is None:
        prefix = prefix[:-1]
    high = None if rest is solver.formulas.false else shape.high
    return ArrayForm(prefix, rest, shape.low, high)


@dataclass(frozen=True, slots=True)
class _Counted:
    """An array with the items that may match written out; those of `rest` all count, or none does."""

    items: tuple[Formula, ...]
    places: tuple[int, ...]  # of items that may match
    rest: Formula
    rest_matches: bool


def _counted(shape: Array, one: Contains, solver: Solver) -> Iterator[Array]:
    """Cases by which items match: enough are made to, and all but enough are made not to."""
    counted = _spread(shape, one, solver)
    both, places = solver.formulas.all_of, counted.places
    never = solver.formulas.negated(one.formula)
    most = len(places) if one.high is None or counted.rest_matches else min(one.high, len(places))
    free_sizes = range(most + 1) if counted.rest_matches and one.high is not None else [most]
    for free in (chosen for size in free_sizes if size <= (one.high or most) for chosen in combinations(places, size)):
        for must in _needed(free, one, counted):
            solver.tools.budget.spend(1 + len(places) // 4)
            items = list(counted.items)
            for at in places:
                extra = one.formula if at in must else solver.formulas.true if at in free else never
                items[at] = both(items[at], extra)
            yield from _sized(shape, tuple(items), must, free, one, counted)


def _needed(free: Sequence[int], one: Contains, counted: _Counted) -> Iterator[tuple[int, ...]]:
    sizes = range(min(one.low, len(free)) + 1) if counted.rest_matches else [one.low]
    return (chosen for size in sizes for chosen in combinations(free, size))


def _sized(
    shape: Array,
    items: tuple[Formula, ...],
    must: tuple[int, ...],
    free: tuple[int, ...],
    one: Contains,
    counted: _Counted,
) -> Iterator[Array]:
    low, high = max([shape.low, *(at + 1 for at in must)]), shape.high
    if counted.rest_matches:
        if len(must) < one.low:
            low = max(low, len(items) + one.low - len(must))
        if one.high is not None:
            most = len(items) + one.high - len(free)
            high = most if high is None else min(high, most)
    if high is None or low <= high:
        yield replace(shape, prefix=items, rest=counted.rest, low=low, high=high)


def _spread(shape: Array, one: Contains, solver: Solver) -> _Counted:
    both, is_empty = solver.formulas.all_of, solver.is_empty
    never = solver.formulas.negated(one.formula)
    length, rest = max(len(shape.prefix), one.start), shape.rest
    rest_counts = not is_empty(both(rest, one.formula))
    if rest_counts and not is_empty(both(rest, never)):
        rest_counts = False
        if shape.high is not None and shape.high <= MAX_LENGTH:
            length = max(length, shape.high)
        else:
            length = max(length, one.start + WINDOW)
            rest = rest if one.high is None else both(rest, never)
    items = tuple(shape.item(at) for at in range(length))
    end = length if shape.high is None else min(length, shape.high)
    places = tuple(at for at in range(one.start, end) if not is_empty(both(items[at], one.formula)))
    if len(places) > MAX_LENGTH:
        refuse("contains", shape.where, "too many items")
    return _Counted(items, places, rest, rest_counts)


def _distinct(shape: Array, solver: Solver) -> list[Array]:
    if shape.high is not None and shape.high < 2:
        return [replace(shape, unique=None)] if shape.unique else []
    if shape.high is None and shape.unique and (repeated := _values(shape.rest, solver)) is not None:
        shape = replace(shape, high=len(shape.prefix) + len(repeated))
    if shape.high is None or shape.high > MAX_LENGTH:
        refuse("uniqueItems", shape.where, "set maxItems, and items of few values")
    items = [shape.item(at) for at in range(shape.high)]
    if all(solver.is_empty(solver.formulas.all_of(a, b)) for a, b in combinations(items, 2)):
        return [replace(shape, unique=None)] if shape.unique else []
    listed = [_values(item, solver) for item in items]
    if any(values is None for values in listed):
        refuse("uniqueItems", shape.where, "set items of few values")
    found = list[Array]()
    for length in range(shape.low, shape.high + 1):
        for values in product(*(values or () for values in listed[:length])):
            solver.tools.budget.spend(1 + length // 8)
            if (len({key_of(value) for value in values}) == length) == shape.unique:
                found.append(_exactly(shape, values, solver))
            if len(found) > solver.tools.limits.max_subsets:
                refuse("uniqueItems", shape.where, "too many cases")
    return found


def _exactly(shape: Array, values: Sequence[Any], solver: Solver) -> Array:
    items = tuple(literal(solver.tools, value) for value in values)
    return Array(items, solver.formulas.false, len(items), len(items), where=shape.where)


def _values(item: Formula, solver: Solver) -> list[Any] | None:
    """All of them; None where they are many, or not simple."""
    found = list[Any]()
    for shapes in solver.shapes(item).values():
        for shape in shapes:
            values = _listed(shape)
            if values is None or len(found) + len(values) > MAX_VALUES:
                return None
            found += values
    return found


def _listed(shape: Shape) -> list[Any] | None:
    if isinstance(shape, Constant):
        return sorted(shape.values, key=str)
    if isinstance(shape, Number):
        values = numbers.listed(shape)
        return None if values is None else [as_json(value) for value in sorted(values)]
    return sorted(shape.only) if isinstance(shape, String) and shape.only is not None else None
