"""Formulas as shapes: what a schema says about each kind of values, all case splits done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from core.grammar.schema import arrays, numbers, objects, strings
from core.grammar.schema.arrays import Array
from core.grammar.schema.formulas import Formula, Formulas, Join
from core.grammar.schema.languages import Languages
from core.grammar.schema.limits import Budget
from core.grammar.schema.numbers import Number
from core.grammar.schema.objects import Object
from core.grammar.schema.shapes import BOOLEAN, KINDS, NULL, Constant, Shape, Shapes, all_shapes
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools
from core.stages.grammar import GrammarError


class _NotKnownError(Exception):
    """Whether a formula is empty depends on itself."""


class Solver:
    """All formulas of one schema, each expanded once."""

    def __init__(self, budget: Budget, unfold: Callable[[Formula], list[Formula]]):
        self.formulas = Formulas()
        self.tools = Tools(self.formulas, Languages(budget), budget, self.is_empty)
        self._unfold = unfold
        self._shapes: dict[Formula, Shapes] = {}
        self._empty: dict[Formula, bool] = {}
        self._under_way: dict[Formula, int] = {}  # with the level of values that is looked at
        self._level = 0
        self.everything = all_shapes(self.tools)
        self._free = frozenset(shape for (shape,) in self.everything.values())

    def shapes(self, formula: Formula) -> Shapes:
        """Raises GrammarError."""
        found = self._shapes.get(formula)
        if found is None:
            started = self._under_way.get(formula)
            if started is not None:
                if started < self._level:
                    raise _NotKnownError
                raise GrammarError("a schema that refers to itself without a level in between is not supported")
            self._under_way[formula] = self._level
            try:
                found = self._shapes[formula] = self._expanded(formula)
            finally:
                del self._under_way[formula]
        return found

    def is_empty(self, formula: Formula) -> bool:
        """Whether no value satisfies it; False where that is not clear soon."""
        if formula is self.formulas.true or self._level >= self.tools.limits.max_look_ahead:
            return False
        found = self._empty.get(formula)
        if found is None:
            self._level += 1
            try:
                found = not any(self.shapes(formula).values())
            except _NotKnownError:
                found = False
            finally:
                self._level -= 1
            self._empty[formula] = found
        return found

    def _expanded(self, formula: Formula) -> Shapes:
        if formula.join in (Join.TRUE, Join.FALSE):
            return self.everything if formula is self.formulas.true else {}
        if formula.join is Join.SHAPES:
            return formula.shapes or {}
        if formula.join is Join.SCHEMA:
            return self._all(self._unfold(formula))
        if formula.join is Join.AND:
            return self._all(formula.parts)
        if formula.join is Join.OR:
            return self._union(map(self.shapes, formula.parts))
        if formula.join is Join.ONE:
            return self._one_of(self.everything, formula.parts)
        return self._opposite(formula.parts[0])

    def _all(self, parts: Iterable[Formula]) -> Shapes:
        """Of exactly-one formulas last: what the others say may keep their options apart."""
        parts = list(parts)
        found: Shapes = self.everything
        for part in parts:
            if part.join is not Join.ONE:
                found = self.both(found, self.shapes(part))
        for part in parts:
            if part.join is Join.ONE:
                found = self._one_of(found, part.parts)
        return found

    def _one_of(self, context: Shapes, options: tuple[Formula, ...]) -> Shapes:
        cases = [self.both(context, self.shapes(option)) for option in options]
        for at in range(len(options)):
            for other in (*options[:at], *options[at + 1 :]):
                if any(self.both(cases[at], self.shapes(other)).values()):
                    cases[at] = self.both(cases[at], self.shapes(self.formulas.negated(other)))
        return self._union(cases)

    def _opposite(self, formula: Formula) -> Shapes:
        negated = self.formulas.negated
        if formula.join is Join.SCHEMA:
            return self._union(self.shapes(negated(part)) for part in self._unfold(formula))
        if formula.join is Join.ONE:
            parts = formula.parts
            pairs = (self.both(self.shapes(a), self.shapes(b)) for at, a in enumerate(parts) for b in parts[at + 1 :])
            return self._union([self._all(map(negated, parts)), *pairs])
        return self.complement(formula.shapes or {})

    def both(self, a: Shapes, b: Shapes) -> Shapes:
        if a is self.everything or b is self.everything:
            return b if a is self.everything else a
        found = {}
        for kind in KINDS:
            found[kind] = self._bounded(
                shape
                for left in a.get(kind, ())
                for right in b.get(kind, ())
                if (shape := self._intersection(left, right)) is not None
            )
        return found

    def _intersection(self, a: Shape, b: Shape) -> Shape | None:
        self.tools.budget.spend()
        if a in self._free or b in self._free:
            return b if a in self._free else a
        if a == b:
            return a
        if isinstance(a, Constant) and isinstance(b, Constant):
            values = a.values & b.values
            return Constant(values) if values else None
        if isinstance(a, Number) and isinstance(b, Number):
            return numbers.intersection(a, b)
        if isinstance(a, String) and isinstance(b, String):
            return strings.intersection(a, b, self.tools)
        if isinstance(a, Array) and isinstance(b, Array):
            return arrays.intersection(a, b, self.tools)
        assert isinstance(a, Object) and isinstance(b, Object)
        return objects.intersection(a, b, self.tools)

    def complement(self, shapes: Shapes) -> Shapes:
        """All values that are in none of `shapes`: of each kind, those that are outside of one and outside of the next."""
        found: dict[str, tuple[Shape, ...]] = {}
        for kind in KINDS:
            left: tuple[Shape, ...] = self.everything[kind]
            for shape in shapes.get(kind, ()):
                outside = self._outside(shape)
                pairs = (self._intersection(a, b) for a in left for b in outside)
                left = self._bounded(pair for pair in pairs if pair is not None)
            found[kind] = left
        return found

    def _outside(self, shape: Shape) -> tuple[Shape, ...]:
        if isinstance(shape, Constant):
            others = (NULL.values if None in shape.values else BOOLEAN.values) - shape.values
            return (Constant(others),) if others else ()
        if isinstance(shape, Number):
            return numbers.complement(shape)
        if isinstance(shape, String):
            return strings.complement(shape, self.tools)
        if isinstance(shape, Array):
            return arrays.complement(shape, self.tools)
        return objects.complement(shape, self.tools)

    def _union(self, options: Iterable[Shapes]) -> Shapes:
        found: dict[str, list[Shape]] = {kind: [] for kind in KINDS}
        for option in options:
            if option is self.everything:
                return option
            for kind, shapes in option.items():
                found[kind] += shapes
        return {kind: self._bounded(shapes) for kind, shapes in found.items()}

    def _bounded(self, shapes: Iterable[Shape]) -> tuple[Shape, ...]:
        """Without shapes that are there twice; values that are listed become one list."""
        found: dict[Shape, None] = {}
        for shape in shapes:
            if shape in self._free:
                return (shape,)
            found[shape] = None
            if len(found) > self.tools.limits.max_cases:
                raise GrammarError("a schema with so many cases is not supported")
        return tuple(found) if len(found) < 2 else tuple(_with_one_list(found))


def _with_one_list(shapes: Iterable[Shape]) -> Iterator[Shape]:
    constants = [shape for shape in shapes if isinstance(shape, Constant)]
    if constants:
        yield Constant(frozenset().union(*(shape.values for shape in constants)))
    numbers_listed = [s.only for s in shapes if isinstance(s, Number) and s.only is not None]
    strings_listed = [s.only for s in shapes if isinstance(s, String) and s.only is not None]
    if numbers_listed:
        yield Number(only=frozenset().union(*numbers_listed))
    if strings_listed:
        yield String(only=frozenset().union(*strings_listed))
    for shape in shapes:
        if not isinstance(shape, Constant) and getattr(shape, "only", None) is None:
            yield shape
