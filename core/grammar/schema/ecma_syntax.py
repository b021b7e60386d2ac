"""Patterns of ECMA 262 as trees. What is not in them is refused: no guess about what another dialect means by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from core.grammar.schema import characters
from core.grammar.schema.characters import Ranges
from core.stages.grammar import GrammarError


@dataclass(frozen=True, slots=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """The start or the end of the text."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Ahead:
    body: Node
    negative: bool


Node = Chars | Sequence | Choice | Loop | Edge | Ahead

MAX_REPEAT = 4096
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_CLASSES = {"d": characters.DIGIT, "w": characters.WORD, "s": characters.SPACE}


def parse(pattern: str) -> Node:
    """Raises GrammarError for what is no pattern, and for what no finite automaton knows."""
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, pattern: str):
        self._text = pattern
        self._at = 0

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
        low, high = self._times()
        if (low, high) == (1, 1):
            return node
        self._take("?")  # lazy: the same texts match
        if isinstance(node, Edge | Ahead):
            self._wrong("an assertion cannot be repeated")
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            self._wrong("there is nothing to repeat")
        return Loop(node, low, high)

    def _times(self) -> tuple[int, int | None]:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if not self._take("{"):
            return 1, 1
        low = self._number()
        high: int | None = low
        if self._take(","):
            high = None if self._text.startswith("}", self._at) else self._number()
        if not self._take("}"):
            self._wrong("a count must be {n}, {n,} or {n,m}")
        if high is not None and high < low:
            self._wrong("the numbers of a count are out of order")
        return low, high

    def _number(self) -> int:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        digits = self._text[start : self._at]
        if not digits or len(digits) > 6 or int(digits) > MAX_REPEAT:
            self._wrong(f"a count must be a number of at most {MAX_REPEAT}")
        return int(digits)

    def _atom(self) -> Node:
        letter = self._next()
        if letter in "^$":
            return Edge(is_start=letter == "^")
        if letter == "(":
            return self._group()
        if letter == "[":
            return Chars(self._class())
        if letter == ".":
            return Chars(characters.complement(characters.LINE_END))
        if letter == "\\":
            return Chars(self._escape(in_class=False))
        if letter in "*+?{":
            self._wrong("there is nothing to repeat")
        return Chars(characters.of_text(letter))

    def _group(self) -> Node:
        ahead: bool | None = None
        if self._take("?"):
            kind = self._next()
            if kind == "<" and not self._text.startswith(("=", "!"), self._at):
                self._name()
            elif kind in "=!":
                ahead = kind == "!"
            elif kind != ":":
                self._wrong(f"(?{kind} is not supported")
        node = self._choice()
        if not self._take(")"):
            self._wrong("a bracket is not closed")
        return node if ahead is None else Ahead(node, ahead)

    def _name(self) -> None:
        end = self._text.find(">", self._at)
        if end < 0 or not self._text[self._at : end].isidentifier():
            self._wrong("a group's name is malformed")
        self._at = end + 1

    def _class(self) -> Ranges:
        negative, found = self._take("^"), list[tuple[int, int]]()
        while not self._take("]"):
            first = self._class_atom()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._class_atom()
                first = self._range(first, last)
            found += first
        ranges = characters.union(found)
        return characters.complement(ranges) if negative else ranges

    def _range(self, first: Ranges, last: Ranges) -> Ranges:
        ends = [ranges[0][0] for ranges in (first, last) if len(ranges) == 1 and ranges[0][0] == ranges[0][1]]
        if len(ends) < 2 or ends[0] > ends[1]:
            self._wrong("a range of a class is out of order")
        return characters.intersection(((ends[0], ends[1]),), characters.ALL)

    def _class_atom(self) -> Ranges:
        letter = self._next()
        return self._escape(in_class=True) if letter == "\\" else characters.of_text(letter)

    def _escape(self, in_class: bool) -> Ranges:
        letter = self._next()
        if (lower := letter.lower()) in _CLASSES:
            return _CLASSES[lower] if letter == lower else characters.complement(_CLASSES[lower])
        if lower == "p":
            return self._property(negative=letter == "P")
        if letter in _CONTROL and not (letter == "0" and self._text[self._at : self._at + 1].isdigit()):
            return ((_CONTROL[letter], _CONTROL[letter]),)
        if letter in "xuc":
            point = self._code(letter)
            return ((point, point),)
        if letter == "b" and in_class:
            return ((0x08, 0x08),)
        if letter.isalnum() or letter == "_":
            self._wrong(f"\\{letter} is not supported")
        return characters.of_text(letter)

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
        if kind == "u" and self._take("{"):
            end = self._text.find("}", self._at)
            point = self._hexadecimal(max(end, 0) - self._at)
            self._at += 1
        else:
            point = self._hexadecimal(2 if kind == "x" else 4)
        if 0xD800 <= point < 0xDC00 and self._text.startswith("\\u", self._at):
            self._at += 2
            point = 0x10000 + ((point - 0xD800) << 10) + (self._hexadecimal(4) - 0xDC00)
        if 0xD800 <= point < 0xE000 or not 0 <= point <= characters.LAST:
            self._wrong("an escaped code point is none of a character")
        return point

    def _hexadecimal(self, count: int) -> int:
        digits = self._text[self._at : self._at + count] if 0 < count <= 6 else ""
        if len(digits) != count or not all(letter in "0123456789abcdefABCDEF" for letter in digits):
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
