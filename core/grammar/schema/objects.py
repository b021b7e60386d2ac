"""Sets of objects: rules of the form "properties with a name in this set have a value like that"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from core.grammar.schema import strings
from core.grammar.schema.formulas import Formula
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools

Rule = tuple[String, Formula]


@dataclass(frozen=True, slots=True)
class Object:
    rules: tuple[Rule, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None  # properties
    some: tuple[Rule, ...] = ()  # one property at least has a name in the set, and a value like that
    order: tuple[str, ...] = field(default=(), compare=False)  # names as the schema lists them
    where: str = field(default="", compare=False)  # the schema that it comes from, for messages

    def values(self, names: Iterable[str], tools: Tools) -> dict[str, Formula]:
        """What the properties of these names satisfy."""
        found: dict[str, list[Formula]] = {name: [] for name in names}
        tools.budget.spend((len(self.rules) + len(found) * sum(rule.only is None for rule, _ in self.rules)) // 4)
        for rule, formula in self.rules:
            if rule.only is not None:
                for name in rule.only & found.keys():
                    found[name].append(formula)
            else:
                for name, formulas in found.items():
                    if rule.accepts(name, tools):
                        formulas.append(formula)
        return {name: tools.formulas.all_of(*formulas) for name, formulas in found.items()}


def intersection(a: Object, b: Object, tools: Tools) -> Object | None:
    merged: dict[String, Formula] = {}
    for names, formula in (*a.rules, *b.rules):
        known = merged.get(names)
        merged[names] = formula if known is None else tools.formulas.all_of(known, formula)
    highs = [high for high in (a.high, b.high) if high is not None]
    required = tuple(dict.fromkeys((*a.required, *b.required)))
    found = Object(
        rules=tuple(merged.items()),
        required=required,
        low=max(a.low, b.low),
        high=min(highs, default=None),
        some=tuple(dict.fromkeys((*a.some, *b.some))),
        order=tuple(dict.fromkeys((*a.order, *b.order))),
        where=a.where or b.where,
    )
    return None if _is_impossible(found, (a, b), tools) else found


def _is_impossible(shape: Object, made_of: tuple[Object, ...], tools: Tools) -> bool:
    """Looks closer at required properties whose values no object had that `shape` is made of."""
    low = max(shape.low, len(shape.required))
    if shape.high is not None and low > shape.high:
        return True
    if any(formula is tools.formulas.false for _, formula in shape.some):
        return True
    values = shape.values(shape.required, tools)
    known = [one.values(shape.required, tools) for one in made_of]
    for name, formula in values.items():
        if any(formula is one[name] for one in known):
            if formula is tools.formulas.false:
                return True
        elif tools.is_empty(formula):
            return True
    return False


def complement(shape: Object, tools: Tools) -> tuple[Object, ...]:
    free = Object(order=shape.order, where=shape.where)
    found = [replace(free, high=shape.low - 1)] if shape.low else []
    if shape.high is not None:
        found.append(replace(free, low=shape.high + 1))
    found += [without(free, name, tools) for name in shape.required]
    for names, formula in shape.rules:
        found += some(free, names, tools.formulas.negated(formula), tools)
    for names, formula in shape.some:
        found.append(replace(free, rules=((names, tools.formulas.negated(formula)),)))
    return tuple(found)


def without(shape: Object, name: str, tools: Tools) -> Object:
    rule = (String(only=frozenset((name,))), tools.formulas.false)
    return replace(shape, rules=(*shape.rules, rule))


def some(shape: Object, names: String, formula: Formula, tools: Tools) -> list[Object]:
    """`shape` with a property that has a name of `names` and a value like `formula`: as many cases as there are names."""
    if formula is tools.formulas.false:
        return []
    if names.only is None:
        if names == strings.ANY and formula is tools.formulas.true:
            return [replace(shape, low=max(shape.low, 1))]
        return [replace(shape, some=(*shape.some, (names, formula)))]
    return [
        replace(
            shape,
            rules=(*shape.rules, (String(only=frozenset((name,))), formula)),
            required=tuple(dict.fromkeys((*shape.required, name))),
        )
        for name in sorted(names.only)
    ]
