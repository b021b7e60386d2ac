"""Regular languages with intersection and complement: what patterns and names of properties are rewritten with.

Terms are interned, so that equal ones are one object, and explored by derivatives (Brzozowski, "Derivatives of regular
expressions", 1964; Owens, Reppy and Turon, "Regular-expression derivatives re-examined", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges
from core.grammar.schema.limits import Budget


class Op(Enum):
    NONE = "no text"
    EMPTY = "the empty text"
    CHARS = "one character"
    CAT = "one after the other"
    ALT = "any of them"
    AND = "all of them"
    NOT = "not"
    LOOP = "repeated"


class Language:
    """A set of texts. Made by `Languages` alone; equal languages need not be equal terms."""

    plain: bool  # a regular expression can write it
    __slots__ = ("chars", "high", "low", "nullable", "op", "parts", "plain", "uid")

    def __init__(self, uid: int, op: Op, parts: tuple[Language, ...], chars: Ranges, low: int, high: int | None):
        self.uid, self.op, self.parts, self.chars, self.low, self.high = uid, op, parts, chars, low, high
        self.nullable = _nullable(self)
        self.plain = op not in (Op.AND, Op.NOT) and all(
            part.plain for part in parts
        )  # a regular expression can write it


def _nullable(term: Language) -> bool:
    if term.op in (Op.CAT, Op.AND):
        return all(part.nullable for part in term.parts)
    if term.op is Op.ALT:
        return any(part.nullable for part in term.parts)
    if term.op is Op.NOT:
        return not term.parts[0].nullable
    return term.op is Op.EMPTY or (term.op is Op.LOOP and term.low == 0)


class Languages:
    """Makes terms, simplified enough that the derivatives of one are finitely many."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self._terms: dict[tuple[object, ...], Language] = {}
        self._derived: dict[tuple[int, int], Language] = {}
        self.none = self._term(Op.NONE)
        self.empty = self._term(Op.EMPTY)
        self.any_char = self.chars(characters.ALL)
        self.any = self.loop(self.any_char)

    def _term(
        self, op: Op, parts: tuple[Language, ...] = (), chars: Ranges = (), low: int = 0, high: int | None = None
    ) -> Language:
        key = (op, tuple(part.uid for part in parts), chars, low, high)
        found = self._terms.get(key)
        if found is None:
            self.budget.spend()
            found = self._terms[key] = Language(len(self._terms), op, parts, chars, low, high)
        return found

    def chars(self, ranges: Ranges) -> Language:
        return self._term(Op.CHARS, chars=ranges) if ranges else self.none

    def text(self, text: str) -> Language:
        return self.cat(*(self.chars(((ord(letter), ord(letter)),)) for letter in text))

    def texts(self, texts: Iterable[str]) -> Language:
        return self.alt(*(self.text(text) for text in texts))

    def cat(self, *terms: Language) -> Language:
        """Nested to the right."""
        result = self.empty
        for term in reversed(terms):
            result = self._pair(term, result)
        return result

    def _pair(self, left: Language, right: Language) -> Language:
        if right is self.empty or right is self.none:
            return left if right is self.empty else right
        parts = list[Language]()
        while left.op is Op.CAT:
            parts.append(left.parts[0])
            left = left.parts[1]
        right = self._two(left, right)
        for part in reversed(parts):
            right = self._two(part, right)
        return right

    def _two(self, left: Language, right: Language) -> Language:
        """`left` is no CAT, `right` has another text than the empty one."""
        if left is self.none or left is self.empty:
            return right if left is self.empty else left
        if left is self.any and (right is self.any or (right.op is Op.CAT and right.parts[0] is self.any)):
            return right
        return self._term(Op.CAT, (left, right))

    def alt(self, *terms: Language) -> Language:
        found = self._flat(Op.ALT, terms)
        found.pop(self.none.uid, None)
        if self.any.uid in found:
            return self.any
        singles = [term for term in found.values() if term.op is Op.CHARS]
        if len(singles) > 1:
            for term in singles:
                del found[term.uid]
            merged = self.chars(characters.union(span for term in singles for span in term.chars))
            found[merged.uid] = merged
        if self.empty.uid in found and any(term.nullable for term in found.values() if term is not self.empty):
            del found[self.empty.uid]
        return self._joined(Op.ALT, found, self.none)

    def both(self, *terms: Language) -> Language:
        found = self._flat(Op.AND, terms)
        found.pop(self.any.uid, None)
        if self.none.uid in found:
            return self.none
        if self.empty.uid in found:
            return self.empty if all(term.nullable for term in found.values()) else self.none
        if any(self._opposite(term).uid in found for term in found.values()):
            return self.none
        return self._joined(Op.AND, found, self.any)

    def _opposite(self, term: Language) -> Language:
        return term.parts[0] if term.op is Op.NOT else self.complement(term)

    def _flat(self, op: Op, terms: Iterable[Language]) -> dict[int, Language]:
        found: dict[int, Language] = {}
        for term in terms:
            for part in term.parts if term.op is op else (term,):
                found[part.uid] = part
        self.budget.spend(len(found) // 8)
        return found

    def _joined(self, op: Op, found: dict[int, Language], nothing: Language) -> Language:
        if len(found) < 2:
            return next(iter(found.values()), nothing)
        return self._term(op, tuple(found[uid] for uid in sorted(found)))

    def complement(self, term: Language) -> Language:
        if term.op is Op.NOT:
            return term.parts[0]
        if term is self.none:
            return self.any
        return self.none if term is self.any else self._term(Op.NOT, (term,))

    def loop(self, term: Language, low: int = 0, high: int | None = None) -> Language:
        if term is self.none or term is self.empty or high == 0:
            return self.empty if low == 0 or term is self.empty else self.none
        low = 0 if term.nullable else low
        if (low, high) == (1, 1):
            return term
        if term.op is Op.LOOP and term.low == 0 and term.high is None:
            return term
        return self._term(Op.LOOP, (term,), low=low, high=high)

    def derivative(self, term: Language, point: int) -> Language:
        """What may follow the character `point` in texts of `term`."""
        key = (term.uid, point)
        found = self._derived.get(key)
        if found is None:
            self.budget.spend()
            found = self._derived[key] = self._derive(term, point)
        return found

    def _derive(self, term: Language, point: int) -> Language:
        if term.op is Op.CHARS:
            return self.empty if characters.contains(term.chars, point) else self.none
        if term.op is Op.ALT:
            return self.alt(*(self.derivative(part, point) for part in term.parts))
        if term.op is Op.AND:
            return self.both(*(self.derivative(part, point) for part in term.parts))
        if term.op is Op.NOT:
            return self.complement(self.derivative(term.parts[0], point))
        if term.op is Op.LOOP:
            high = None if term.high is None else term.high - 1
            rest = self.loop(term.parts[0], max(term.low - 1, 0), high)
            return self._pair(self.derivative(term.parts[0], point), rest)
        if term.op is Op.CAT:
            left, right = term.parts
            first = self._pair(self.derivative(left, point), right)
            return self.alt(first, self.derivative(right, point)) if left.nullable else first
        return self.none

    def matches(self, term: Language, text: str) -> bool:
        """Linear in `text`, whatever the term."""
        for letter in text:
            if term is self.any or term is self.none:
                break
            term = self.derivative(term, ord(letter))
        return term.nullable
