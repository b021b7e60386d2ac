"""Languages written as regular expressions, in the part of the notation that ECMA 262, Rust's regex and Python's re share."""

from __future__ import annotations

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges
from core.grammar.regex.nodes import times
from core.grammar.schema.languages import Language, Op

_META = set("\\^$.|?*+()[]{}/")


class _TooLongError(Exception):
    pass


def written(term: Language, max_length: int) -> str | None:
    """As a pattern that a whole text has to match; None where it would be longer. `term` is plain, and not the empty set."""
    writer = _Writer(max_length)
    try:
        writer.write(term)
    except _TooLongError:
        return None
    return f"^(?:{''.join(writer.parts)})$"


class _Writer:
    """Stops as soon as it is too long: terms share their parts, and written out they may be longer than any memory."""

    def __init__(self, max_length: int):
        self._left = max_length
        self.parts: list[str] = []

    def write(self, term: Language) -> None:
        if term.op is Op.CHARS:
            self._add(_class(term.chars))
        elif term.op is Op.ALT:
            self._alternatives(term)
        elif term.op is Op.CAT:
            for part in _in_a_row(term):
                self._write(part, in_group=part.op is Op.ALT)
        elif term.op is Op.LOOP:
            self._write(term.parts[0], in_group=term.parts[0].op is not Op.CHARS)
            self._add(times(term.low, term.high))

    def _write(self, term: Language, in_group: bool) -> None:
        self._add("(?:" if in_group else "")
        self.write(term)
        self._add(")" if in_group else "")

    def _alternatives(self, term: Language) -> None:
        some = [part for part in term.parts if part.op is not Op.EMPTY]
        has_empty = len(some) < len(term.parts)
        self._add("(?:" if has_empty else "")
        for at, part in enumerate(some):
            self._add("|" if at else "")
            self.write(part)
        self._add(")?" if has_empty else "")

    def _add(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise _TooLongError
        self.parts.append(text)


def _in_a_row(term: Language) -> list[Language]:
    parts = []
    while term.op is Op.CAT:
        parts.append(term.parts[0])
        term = term.parts[1]
    return [*parts, term]


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
