"""Regular expressions parsed. Dialects differ in what they know (`core.grammar.regex.dialects`)."""

from __future__ import annotations

import re
from functools import reduce
from typing import NoReturn, TypeAlias

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges
from core.grammar.regex.dialects import Dialect
from core.grammar.regex.nodes import Ahead, Chars, Choice, Edge, Loop, Node, Sequence
from core.stages.grammar import GrammarError

MAX_DEPTH = 150  # levels of brackets: parsing goes down by calls
_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_SETS = frozenset("dws")
_OPERATORS = ("[", "&&", "--", "~~", "||")
_NO_CHARACTER = "half of a surrogate pair is no character"

_InEach: TypeAlias = tuple[Ranges, ...]
"""What a class is in each notation of a dialect."""


def parse(pattern: str, dialect: Dialect) -> Node:
    """Raises GrammarError for what is no pattern, and for what no finite automaton knows."""
    return _Parser(pattern, dialect).whole()


def _agreed(in_each: _InEach) -> Ranges:
    return reduce(characters.intersection, dict.fromkeys(in_each))


class _Parser:
    def __init__(self, pattern: str, dialect: Dialect):
        self._text = pattern
        self._dialect = dialect
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            self._wrong("a bracket is closed that was not opened")
        return node

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _quantified(self) -> Node:
        node = self._atom()
        times = self._times()
        if times is None:
            return node
        self._take("?")  # lazy: the same texts match
        if isinstance(node, Edge | Ahead):
            self._wrong("an assertion cannot be repeated")
        if self._times() is not None:
            self._wrong("there is nothing to repeat")
        return node if times == (1, 1) else Loop(node, *times)

    def _times(self) -> tuple[int, int | None] | None:
        sign = self._text[self._at : self._at + 1]
        if sign in _SIGNS:
            self._at += 1
            return _SIGNS[sign]
        return self._count() if sign == "{" else None

    def _count(self) -> tuple[int, int | None] | None:
        found = _COUNT.match(self._text, self._at)
        if self._dialect.brace_is_literal and (found is None or found[0] == "{}"):
            return None
        if found is None or not found[1]:  # {,n} is a count in some notations
            self._wrong("a count must be {n}, {n,} or {n,m}")
        self._at = found.end()
        low = self._number(found[1])
        high = self._number(found[3]) if found[3] else None if found[2] else low
        if high is not None and high < low:
            self._wrong("the numbers of a count are out of order")
        return low, high

    def _number(self, digits: str) -> int:
        most = self._dialect.max_repeat
        if len(digits) > len(str(most)) or int(digits) > most:
            self._wrong(f"a count must be a number of at most {most}")
        return int(digits)

    def _atom(self) -> Node:
        if self._times() is not None:
            self._wrong("there is nothing to repeat")
        letter = self._next()
        if letter in "^$":
            return Edge(is_start=letter == "^")
        if letter == "(":
            return self._group()
        if letter == "[":
            return Chars(_agreed(self._class()))
        if letter == ".":
            return Chars(self._dialect.dot)
        if letter != "\\":
            return Chars(self._itself(letter))
        if self._dialect.text_edges and self._text.startswith(("A", "z", "Z"), self._at):
            return Edge(is_start=self._next() == "A")
        return Chars(_agreed(self._escape(in_class=False)))

    def _itself(self, letter: str) -> Ranges:
        if 0xD800 <= ord(letter) < 0xE000:
            self._wrong(_NO_CHARACTER)
        return characters.of_text(letter)

    def _group(self) -> Node:
        ahead: bool | None = None
        if self._take("?"):
            kind = self._next()
            if kind == "P" and self._dialect.python_names and self._take("<"):
                kind = "<"
            if kind == "<" and not self._text.startswith(("=", "!"), self._at):
                self._name()
            elif kind in "=!" and self._dialect.looks_ahead:
                ahead = kind == "!"
            elif kind != ":":
                self._wrong(f"(?{kind} is not supported")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._wrong(f"more than {MAX_DEPTH} levels of brackets are not supported")
        node = self._choice()
        self._depth -= 1
        if not self._take(")"):
            self._wrong("a bracket is not closed")
        return node if ahead is None else Ahead(node, ahead)

    def _name(self) -> None:
        end = self._text.find(">", self._at)
        if end < 0 or not self._text[self._at : end].isidentifier():
            self._wrong("a group's name is malformed")
        self._at = end + 1

    def _class(self) -> _InEach:
        negative, found = self._take("^"), list[_InEach]()
        if not self._dialect.bracket_ends_class and self._text.startswith("]", self._at):
            self._wrong("write \\] for the first character of a class")
        while not self._take("]"):
            self._no_operator()
            first = self._class_atom()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._no_operator()
                self._at += 1
                first = self._same(self._range(first, self._class_atom()))
            found.append(first)
        in_each = [
            characters.union(span for one in found for span in one[at]) for at in range(self._dialect.num_notations)
        ]
        return tuple(map(characters.complement, in_each)) if negative else tuple(in_each)

    def _no_operator(self) -> None:
        if self._dialect.class_operators and self._text.startswith(_OPERATORS, self._at):
            self._wrong("write \\[, \\& and \\- for these in a class")

    def _range(self, *ends: _InEach) -> Ranges:
        points = [one[0][0][0] for one in ends if len(one[0]) == 1 and one[0][0][0] == one[0][0][1]]
        if len(points) < 2 or points[0] > points[1]:
            self._wrong("a range of a class is out of order")
        return characters.intersection(((points[0], points[1]),), characters.ALL)

    def _class_atom(self) -> _InEach:
        letter = self._next()
        return self._escape(in_class=True) if letter == "\\" else self._same(self._itself(letter))

    def _same(self, ranges: Ranges) -> _InEach:
        return (ranges,) * self._dialect.num_notations

    def _escape(self, in_class: bool) -> _InEach:
        letter = self._next()
        if (lower := letter.lower()) in _SETS:
            sets = self._dialect.sets(lower)
            return sets if letter == lower else tuple(map(characters.complement, sets))
        return self._same(self._escaped(letter, in_class))

    def _escaped(self, letter: str, in_class: bool) -> Ranges:
        if letter in "pP" and self._dialect.properties:
            return self._property(negative=letter == "P")
        if letter in _CONTROL and not (letter == "0" and self._text[self._at : self._at + 1].isdecimal()):
            return ((_CONTROL[letter], _CONTROL[letter]),)
        if letter in "xuc" or (letter == "U" and self._dialect.long_escapes):
            point = self._code(letter)
            return ((point, point),)
        if letter == "b" and in_class:
            return ((0x08, 0x08),)
        if letter in "<>" and self._dialect.word_edges:
            self._wrong(f"\\{letter} is an edge of words in some notations; write {letter}")
        if letter.isascii() and letter.isalnum():
            self._wrong(f"\\{letter} is not supported")
        return self._itself(letter)

    def _property(self, negative: bool) -> Ranges:
        end = self._text.find("}", self._at)
        name = self._text[self._at + 1 : end] if self._text.startswith("{", self._at) else ""
        ranges = characters.of_property(name)
        if ranges is None:
            self._wrong(f"\\p{{{name}}} is not supported")
        self._at = end + 1
        return characters.complement(ranges) if negative else ranges

    def _code(self, kind: str) -> int:
        if kind == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                self._wrong("\\c must be followed by a letter")
            return ord(letter) % 32
        if (kind == "u" or self._dialect.long_escapes) and self._take("{"):
            end = self._text.find("}", self._at)
            point = self._hexadecimal(max(end, 0) - self._at)
            self._at += 1
        else:
            point = self._hexadecimal(_CODE_DIGITS[kind])
            if kind == "u" and 0xD800 <= point < 0xDC00 and self._dialect.surrogate_pairs and self._take("\\u"):
                point = self._pair(point, self._hexadecimal(4))
        if 0xD800 <= point < 0xE000 or point > characters.LAST:
            self._wrong("an escaped code point is none of a character")
        return point

    def _pair(self, high: int, low: int) -> int:
        if not 0xDC00 <= low < 0xE000:
            self._wrong(_NO_CHARACTER)
        return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)

    def _hexadecimal(self, count: int) -> int:
        digits = self._text[self._at : self._at + count] if 0 < count <= 8 else ""
        if len(digits) != count or not _HEX.issuperset(digits):
            self._wrong("an escape is malformed")
        self._at += count
        return int(digits, 16)

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._wrong("it ends too soon")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _wrong(self, why: str) -> NoReturn:
        raise GrammarError(f"{why} (character {self._at})")
