"""Objects with a list of properties, patterns that no two names share, and one schema for all other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from core.grammar.schema import automata, strings
from core.grammar.schema.formulas import Formula
from core.grammar.schema.languages import Language, Op
from core.grammar.schema.limits import refuse
from core.grammar.schema.objects import Object, Rule
from core.grammar.schema.regex_text import written
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools

MAX_PATTERNS = 4  # that share names: each of their intersections is a pattern


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """`low` and `high` count properties; `low` is above the required ones by 1 at most, and only where all are required."""

    properties: dict[str, Formula]
    required: frozenset[str]
    patterns: dict[str, Formula]
    others: Formula
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    """Properties that are not listed by name."""

    patterns: dict[str, Formula]
    others: Formula
    is_none: bool


def object_forms(shape: Object, tools: Tools) -> list[ObjectForm]:
    what = f"the number of properties at {shape.where or '#'}"
    cases = tools.bounded(_without_some(shape, tools), f"the properties at {shape.where or '#'}")
    return list(tools.bounded((form for case, opened in cases for form in _Case(case, opened, tools).forms()), what))


def _without_some(shape: Object, tools: Tools) -> Iterator[tuple[Object, int]]:
    """Cases by which property it is that must be there; with the least number of properties that are not listed."""
    if not shape.some:
        yield shape, 0
        return
    known = _names(shape)
    (names, formula), left = shape.some[0], replace(shape, some=shape.some[1:], order=tuple(known))
    for name in known:
        if names.accepts(name, tools):
            rule = (String(only=frozenset((name,))), formula)
            required = tuple(dict.fromkeys((*left.required, name)))
            yield from _without_some(replace(left, rules=(*left.rules, rule), required=required), tools)
    opened = _opened(shape, frozenset(known), tools)
    if not opened.is_none:
        if formula is not tools.formulas.true or not _has_all(names, known, opened, tools):
            refuse("", f"what must not hold for some property at {shape.where or '#'}")
        for case, _ in _without_some(left, tools):
            yield case, 1


def _has_all(names: String, known: Sequence[str], opened: _Open, tools: Tools) -> bool:
    """Whether every property that is not listed has a name in `names`."""
    if names.low or names.high is not None:
        return False
    return names.language is None and names.but <= set(known) and not opened.is_none


def _names(shape: Object) -> list[str]:
    """That rules know, as the schema lists them first."""
    found = dict.fromkeys((*shape.order, *shape.required))
    for names, _ in (*shape.rules, *shape.some):
        found |= dict.fromkeys(sorted((names.only or frozenset()) | names.but))
    return list(found)


class _Case:
    def __init__(self, shape: Object, num_open: int, tools: Tools):
        self._shape, self._num_open, self._tools = shape, num_open, tools
        names = _names(shape)
        self._values = shape.values(names, tools)
        self._open = _opened(shape, frozenset(names), tools)
        false = tools.formulas.false
        self._optional = [name for name in names if name not in shape.required and self._values[name] is not false]

    def forms(self) -> Iterable[ObjectForm]:
        shape, required = self._shape, len(self._shape.required)
        most = required + len(self._optional)
        low = max(shape.low - required, 0)
        high = None if shape.high is None else shape.high - required
        if high is not None and high < 0:
            return []
        if self._open.is_none:
            if self._num_open or required + low > most:
                return []
            high = None if high is None or required + high >= most else high
        if not (low or self._num_open or high is not None):
            return [self._form((), self._optional)]
        return self._closed(low, high) if self._open.is_none else self._opened(low, high)

    def _form(self, must: Sequence[str], may: Sequence[str], num_open: int = 0, high: int | None = None) -> ObjectForm:
        """With the required properties and those of `must`; of the optional ones, those of `may` alone."""
        values, false = self._values, self._tools.formulas.false
        self._tools.budget.spend(len(values) // 16)
        required = frozenset((*self._shape.required, *must))
        kept = required | set(may)
        properties = {name: value if name in kept else false for name, value in values.items()}
        low = len(required) + num_open if num_open else 0
        return ObjectForm(properties, required, self._open.patterns, self._open.others, low, high)

    def _closed(self, low: int, high: int | None) -> Iterator[ObjectForm]:
        """`low` of the optional properties are made to be there, all but `high` are made not to."""
        size = len(self._optional) if high is None else min(high, len(self._optional))
        for may in combinations(self._optional, size):
            for must in combinations(may, low):
                yield self._form(must, may)

    def _opened(self, low: int, high: int | None) -> Iterator[ObjectForm]:
        """Which names that are not listed are there, no grammar knows, so that two of them might be the same."""
        if high is not None and low > high:
            return
        if low > 1:
            refuse("minProperties", self._shape.where, "above 1 with names that are not listed")
        if high is None and not self._num_open:
            for name in self._optional:
                yield self._form((name,), self._optional)
            yield self._form((), (), num_open=1)
            return
        for size in range(min(len(self._optional), high if high is not None else len(self._optional)) + 1):
            for must in combinations(self._optional, size):
                num_open = max(self._num_open, low - size)
                most = None if high is None else len(self._shape.required) + high
                if high is None or size + num_open <= high:
                    yield self._form(must, (), num_open, most)


def _opened(shape: Object, known: frozenset[str], tools: Tools) -> _Open:
    true, false, both = tools.formulas.true, tools.formulas.false, tools.formulas.all_of
    everywhere, special = true, list[Rule]()
    for names, formula in shape.rules:
        if names.only is not None or formula is true:
            continue
        if names.language is None and not names.low and names.high is None:
            everywhere = both(everywhere, formula)
        else:
            special.append((names, formula))
    if everywhere is false or not special:
        return _Open({}, everywhere, everywhere is false)
    by_pattern, others = _partition(special, everywhere, known, shape.where, tools)
    return _Open(by_pattern, others, others is false and all(formula is false for formula in by_pattern.values()))


def _partition(
    special: list[Rule], everywhere: Formula, known: frozenset[str], where: str, tools: Tools
) -> tuple[dict[str, Formula], Formula]:
    """Sets of names that all rules treat alike, as patterns; and what names satisfy that are in none of them.

    Names of `known` do not count: a set that has no others is left out, and where all others are in the patterns, names outside
    satisfy nothing. So a form has a name for each property that it may have beside the listed ones.
    """
    made, both = tools.languages, tools.formulas.all_of
    sides = [_side(strings.as_language(replace(names, but=names.but - known), tools)) for names, _ in special]
    bases = list(dict.fromkeys(base for base, _ in sides))
    overlap = any(not _is_empty(made.both(a, b), tools) for a, b in combinations(bases, 2))
    if overlap and len(bases) > MAX_PATTERNS:
        refuse("patternProperties", where, "so many patterns that share names")
    signs = product((False, True), repeat=len(bases)) if overlap else _one_at_a_time(len(bases))
    unlisted = made.complement(made.texts(sorted(known)))
    found: dict[Formula, list[Language]] = {}
    for inside in signs:
        holds = dict(zip(bases, inside, strict=True))
        rules = (rule[1] for rule, (base, positive) in zip(special, sides, strict=True) if holds[base] == positive)
        formula = both(everywhere, *rules)
        with_all = overlap or not any(inside)
        part = made.both(*(base if holds[base] else made.complement(base) for base in bases if with_all or holds[base]))
        is_empty = _is_empty(made.both(part, unlisted), tools)
        if not any(inside):
            others = tools.formulas.false if is_empty else formula
        elif not is_empty:
            found.setdefault(formula, []).append(part)
    return {
        _pattern(part, known, where, tools): formula
        for formula, parts in found.items()
        if formula is not others
        for part in parts
    }, others


def _one_at_a_time(count: int) -> Iterator[tuple[bool, ...]]:
    yield (False,) * count
    for at in range(count):
        yield tuple(one == at for one in range(count))


def _side(language: Language) -> tuple[Language, bool]:
    return (language.parts[0], False) if language.op is Op.NOT else (language, True)


def _is_empty(language: Language, tools: Tools) -> bool:
    return automata.is_empty(tools.languages, language, tools.limits)


def _pattern(language: Language, known: frozenset[str], where: str, tools: Tools) -> str:
    """Without the listed names where that is short: backends would join their schemas with the pattern's again."""
    made = tools.languages
    listed = sorted(name for name in known if made.matches(language, name))
    without = made.both(language, made.complement(made.texts(listed))) if listed else language
    plain = automata.plain_form(made, without)
    plain = automata.plain_form(made, language) if plain is None or plain is made.none else plain
    if plain is None:
        refuse("patternProperties", where, "patterns that share names in so many ways")
    pattern = written(plain, tools.limits.max_pattern)
    if pattern is None:
        refuse("patternProperties", where, "what it becomes is too long")
    return pattern
