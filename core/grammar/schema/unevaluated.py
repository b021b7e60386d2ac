"""`unevaluatedProperties` and `unevaluatedItems`: what other keywords have looked at depends on which of their options hold, so
each way in which they can hold becomes a case, in which that is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from core.grammar.schema import arrays
from core.grammar.schema.arrays import Array
from core.grammar.schema.formulas import Formula, Join
from core.grammar.schema.keywords import Schema, other_names
from core.grammar.schema.languages import Language
from core.grammar.schema.objects import Object
from core.stages.grammar import GrammarError

if TYPE_CHECKING:
    from core.grammar.schema.reading import Reader

Side = Literal["properties", "items"]
UNEVALUATED: dict[Side, str] = {"properties": "unevaluatedProperties", "items": "unevaluatedItems"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What keywords of a schema have looked at."""

    everything: bool = False
    names: frozenset[str] = frozenset()
    patterns: tuple[Language, ...] = ()
    num_items: int = 0
    contains: tuple[Formula, ...] = ()  # items like these, wherever they are

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            self.everything or other.everything,
            self.names | other.names,
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            max(self.num_items, other.num_items),
            tuple(dict.fromkeys((*self.contains, *other.contains))),
        )


NOTHING = Seen()


@dataclass(frozen=True, slots=True)
class Case:
    """A way in which a schema can hold: if these formulas do too, exactly `seen` was looked at."""

    formulas: tuple[Formula, ...] = ()
    seen: Seen = NOTHING


def unevaluated(reader: Reader, formula: Formula, schema: Schema) -> list[Formula]:
    """What the two keywords say."""
    return [_Cases(reader, side).formula(formula, schema) for side, key in UNEVALUATED.items() if key in schema.raw]


class _Cases:
    def __init__(self, reader: Reader, side: Side):
        self._reader = reader
        self._side = side
        self._formulas = reader.solver.formulas
        self._under_way: set[Formula] = set()
        self._known: dict[Formula, list[Case]] = {}

    def formula(self, formula: Formula, schema: Schema) -> Formula:
        keyword = UNEVALUATED[self._side]
        others = schema.formula(schema.raw[keyword], keyword)
        if others is self._formulas.true:
            return others
        self._where = f"{keyword} at {schema.where}"
        cases = self._of_schema(formula, is_outermost=True)
        rest = (self._formulas.all_of(*case.formulas, self._restriction(case.seen, others, schema)) for case in cases)
        return self._formulas.any_of(*rest)

    def _restriction(self, seen: Seen, others: Formula, schema: Schema) -> Formula:
        tools, everything = self._reader.solver.tools, self._reader.solver.everything
        if seen.everything:
            return self._formulas.true
        if self._side == "properties":
            rule = (other_names(seen.names, seen.patterns, tools), others)
            return self._formulas.of_shapes({**everything, "object": (Object((rule,), where=schema.where),)})
        rest = self._formulas.any_of(others, *seen.contains)
        shape = Array((self._formulas.true,) * seen.num_items, rest, where=schema.where)
        tidied = arrays.tidy(shape, tools, (shape,))
        return self._formulas.of_shapes({**everything, "array": (tidied,) if tidied else ()})

    def _of(self, formula: Formula) -> list[Case]:
        if formula.join is not Join.SCHEMA:
            return [Case()]
        if formula not in self._known:
            self._known[formula] = self._of_schema(formula, is_outermost=False)
        return self._known[formula]

    def _of_schema(self, formula: Formula, is_outermost: bool) -> list[Case]:
        if formula in self._under_way:
            raise GrammarError("a schema that refers to itself without a level in between is not supported")
        self._under_way.add(formula)
        schema = self._reader.schema_of(formula)
        if not is_outermost and UNEVALUATED[self._side] in schema.raw:
            cases = [Case(seen=Seen(everything=True))]
        else:
            cases = [Case(seen=self._own(schema))]
            for options in self._joined(schema):
                cases = self._product(cases, options)
        self._under_way.discard(formula)
        return cases

    def _own(self, schema: Schema) -> Seen:
        raw = schema.raw
        if self._side == "properties":
            patterns = tuple(schema.pattern("patternProperties", one) for one in schema.mapping("patternProperties"))
            return Seen("additionalProperties" in raw, frozenset(schema.mapping("properties")), patterns)
        prefix = raw["items"] if isinstance(raw.get("items"), list) else schema.listed("prefixItems")
        everything = ("items" in raw and not isinstance(raw["items"], list)) or "additionalItems" in raw
        found = (schema.formula(raw["contains"], "contains"),) if "contains" in raw else ()
        return Seen(everything, num_items=len(prefix), contains=found)

    def _product(self, left: list[Case], right: list[Case]) -> list[Case]:
        if right == [Case()]:
            return left
        tools = self._reader.solver.tools
        tools.budget.spend(len(left) * len(right))
        if len(left) * len(right) > tools.limits.max_subsets:
            raise GrammarError(f"{self._where} is not supported: too many cases")
        return [Case((*a.formulas, *b.formulas), a.seen | b.seen) for a in left for b in right]

    def _joined(self, schema: Schema) -> Iterator[list[Case]]:
        raw, reader = schema.raw, self._reader
        if "allOf" in raw:
            yield from map(self._of, reader.options(schema, "allOf"))
        yield from map(self._of, reader.references(schema))
        if "anyOf" in raw:
            yield self._any_of(reader.options(schema, "anyOf"))
        if "oneOf" in raw:
            yield self._one_of(reader.options(schema, "oneOf"))
        if "if" in raw:
            yield self._if(schema)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, then in schema.mapping(keyword).items():
                if not isinstance(then, list):
                    has = reader.has(schema, name)
                    yield self._either(has, self._of(schema.formula(then, keyword, name)), [Case()])

    def _holding(self, formula: Formula) -> list[Case]:
        return [Case((formula, *case.formulas), case.seen) for case in self._of(formula)]

    def _either(self, condition: Formula, then: list[Case], otherwise: list[Case]) -> list[Case]:
        """Not split where both see the same anyway."""
        if {case.seen for case in (*then, *otherwise)} == {NOTHING}:
            return [Case()]
        no = self._formulas.negated(condition)
        first = [Case((condition, *case.formulas), case.seen) for case in then]
        return first + [Case((no, *case.formulas), case.seen) for case in otherwise]

    def _any_of(self, options: list[Formula]) -> list[Case]:
        """Each option that sees something holds or does not, independently of the others."""
        cases, some_hold = [Case()], list[Formula]()
        for option in options:
            split = self._either(option, self._of(option), [Case()])
            if split == [Case()]:
                some_hold.append(option)
            cases = self._product(cases, split)
        if some_hold or len(cases) == 1:
            return cases  # that one holds at least, anyOf itself says
        return cases[:-1]

    def _one_of(self, options: list[Formula]) -> list[Case]:
        if all(case.seen == NOTHING for option in options for case in self._of(option)):
            return [Case()]
        return [case for option in options for case in self._holding(option)]  # that no other holds, oneOf itself says

    def _if(self, schema: Schema) -> list[Case]:
        condition = schema.formula(schema.raw["if"], "if")
        branches = dict.fromkeys(("then", "else"), self._formulas.true)
        branches |= {key: schema.formula(schema.raw[key], key) for key in branches if key in schema.raw}
        then = self._product(self._of(condition), self._of(branches["then"]))
        return self._either(condition, then, self._of(branches["else"]))
