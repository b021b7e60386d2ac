"""What a value must satisfy: schemas and their parts, joined by and, or, exactly one, and not.

Formulas are interned: equal ones are one object, so that what is found out about one is found out once, and recursive schemas
come to an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.grammar.schema.references import Location
    from core.grammar.schema.shapes import Shapes


class Join(Enum):
    TRUE = "every value"
    FALSE = "no value"
    SCHEMA = "what a schema of the document says"
    SHAPES = "values of these shapes"
    AND = "all of them"
    OR = "any of them"
    ONE = "exactly one of them"
    NOT = "not"


class Formula:
    """Made by `Formulas` alone; compared by identity."""

    __slots__ = ("join", "location", "parts", "shapes", "uid")

    def __init__(self, uid: int, join: Join, parts: tuple[Formula, ...] = ()):
        self.uid = uid
        self.join = join
        self.parts = parts
        self.location: Location | None = None
        self.shapes: Shapes | None = None

    def __repr__(self) -> str:
        inside = self.location.pointer if self.location else ", ".join(map(repr, self.parts))
        return f"{self.join.name}#{self.uid}({inside})"


class Formulas:
    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Formula] = {}
        self._count = 0
        self.true = self._new(Join.TRUE)
        self.false = self._new(Join.FALSE)

    def _new(self, join: Join, parts: tuple[Formula, ...] = ()) -> Formula:
        self._count += 1
        return Formula(self._count, join, parts)

    def schema(self, location: Location) -> Formula:
        if isinstance(location.schema, bool):
            return self.true if location.schema else self.false
        key = (Join.SCHEMA, location.key)
        if key not in self._known:
            self._known[key] = self._new(Join.SCHEMA)
            self._known[key].location = location
        return self._known[key]

    def of_shapes(self, shapes: Shapes) -> Formula:
        """Not interned: whoever makes one keeps it."""
        found = self._new(Join.SHAPES)
        found.shapes = shapes
        return found

    def all_of(self, *parts: Formula) -> Formula:
        found = self._flat(Join.AND, parts)
        found.pop(self.true.uid, None)
        if self.false.uid in found or self._contradict(found):
            return self.false
        return self._joined(Join.AND, found, self.true)

    def any_of(self, *parts: Formula) -> Formula:
        found = self._flat(Join.OR, parts)
        found.pop(self.false.uid, None)
        if self.true.uid in found or self._contradict(found):
            return self.true
        return self._joined(Join.OR, found, self.false)

    def one_of(self, *parts: Formula) -> Formula:
        some = [part for part in parts if part is not self.false]
        if len(some) < 2:
            return self.any_of(*some)
        key = (Join.ONE, tuple(part.uid for part in some))
        if key not in self._known:
            self._known[key] = self._new(Join.ONE, tuple(some))
        return self._known[key]

    def negated(self, part: Formula) -> Formula:
        if part.join is Join.NOT:
            return part.parts[0]
        if part.join in (Join.TRUE, Join.FALSE):
            return self.false if part is self.true else self.true
        if part.join is Join.AND:
            return self.any_of(*map(self.negated, part.parts))
        if part.join is Join.OR:
            return self.all_of(*map(self.negated, part.parts))
        key = (Join.NOT, part.uid)
        if key not in self._known:
            self._known[key] = self._new(Join.NOT, (part,))
        return self._known[key]

    def _flat(self, join: Join, parts: Iterable[Formula]) -> dict[int, Formula]:
        found: dict[int, Formula] = {}
        for part in parts:
            for inner in part.parts if part.join is join else (part,):
                found[inner.uid] = inner
        return found

    def _contradict(self, found: dict[int, Formula]) -> bool:
        return any(part.join is Join.NOT and part.parts[0].uid in found for part in found.values())

    def _joined(self, join: Join, found: dict[int, Formula], nothing: Formula) -> Formula:
        if len(found) < 2:
            return next(iter(found.values()), nothing)
        uids = tuple(sorted(found))
        key = (join, uids)
        if key not in self._known:
            self._known[key] = self._new(join, tuple(found[uid] for uid in uids))
        return self._known[key]
