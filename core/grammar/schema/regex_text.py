"""Languages written as regular expressions, in the part of the notation that ECMA 262, Rust's regex and Python's re share."""

from __future__ import annotations

from core.grammar.schema import characters
from core.grammar.schema.characters import Ranges
from core.grammar.schema.languages import Language, Op

_META = set("\\^$.|?*+()[]{}/")


def written(term: Language) -> str:
    """As a pattern that a whole text has to match. `term` is plain, and not the empty set."""
    return f"^(?:{_write(term)})$"


def _write(term: Language) -> str:
    if term.op is Op.EMPTY:
        return ""
    if term.op is Op.CHARS:
        return _class(term.chars)
    if term.op is Op.ALT:
        some = [part for part in term.parts if part.op is not Op.EMPTY]
        listed = "|".join(_write(part) for part in some)
        return listed if len(some) == len(term.parts) else f"(?:{listed})?"
    if term.op is Op.CAT:
        return "".join(f"(?:{_write(part)})" if part.op is Op.ALT else _write(part) for part in _in_a_row(term))
    return f"{_atom(term.parts[0])}{_times(term.low, term.high)}"


def _in_a_row(term: Language) -> list[Language]:
    parts = []
    while term.op is Op.CAT:
        parts.append(term.parts[0])
        term = term.parts[1]
    return [*parts, term]


def _atom(term: Language) -> str:
    return _write(term) if term.op is Op.CHARS else f"(?:{_write(term)})"


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _class(ranges: Ranges) -> str:
    if ranges == characters.ALL:
        return r"[\s\S]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        letter = chr(ranges[0][0])
        return f"\\{letter}" if letter in _META else _letter(ranges[0][0])
    others = characters.complement(ranges)
    return f"[^{_spans(others)}]" if len(others) < len(ranges) else f"[{_spans(ranges)}]"


def _spans(ranges: Ranges) -> str:
    return "".join(_letter(a, True) if a == b else f"{_letter(a, True)}-{_letter(b, True)}" for a, b in ranges)


def _letter(point: int, in_class: bool = False) -> str:
    """Nothing that means something inside a class in any of the notations stands there as itself."""
    letter = chr(point)
    if point < 0x80:
        return letter if letter.isalnum() or (not in_class and 0x20 <= point < 0x7F) else f"\\x{point:02x}"
    return letter if letter.isprintable() or point > 0xFFFF else f"\\u{point:04x}"
