"""Regular expressions, as far as ECMAScript's, Python's and Rust's agree on them, to rules.

`\\d`, `\\w` and `\\s` are ASCII's, a dot is any character but a line feed, and characters are Unicode's code points. What is no
regular language (back references), looks around, or is a flag, is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from core.stages.grammar import GrammarError
from plugins.grammars.rules import (
    ANY,
    EMPTY,
    LAST,
    MAX_DEPTH,
    Chars,
    Expr,
    Range,
    Repeat,
    Text,
    alt,
    chars,
    minus,
    others,
    seq,
)

DIGITS = chars([(0x30, 0x39)])
WORD = chars([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = chars([(0x09, 0x0D), (0x20, 0x20)])
DOT = minus(ANY, chars([(0x0A, 0x0A)]))
_SETS = {"d": DIGITS, "D": others(DIGITS), "w": WORD, "W": others(WORD), "s": SPACE, "S": others(SPACE)}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_PLAIN = frozenset("^$\\.*+?()[]{}|/-\"'#&~<>=!:,;@%`_ ")
MAX_COUNT = 100_000


@dataclass(frozen=True, slots=True)
class _Edge:
    """`^` or `$`."""

    start: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each a sequence, in which edges still stand."""

    options: tuple[tuple[_Node, ...], ...]


_Node: TypeAlias = Expr | _Edge | _Group


def parse_regex(pattern: str, *, anywhere: bool = False) -> Expr:
    """What the whole of a text must match; with `anywhere` what must match somewhere in it, as a JSON schema's `pattern`.

    Raises GrammarError that says where.
    """
    group = _Parser(pattern).parse()
    found = []
    for option in group.options:
        found += _Edges(anywhere).resolve(option)
    return alt(found)


class _Parser:
    def __init__(self, pattern: str):
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Group:
        group = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a closing bracket without an opening one")
        return group

    def _error(self, what: str) -> GrammarError:
        return GrammarError(f"regular expression, character {self._at + 1}: {what}")

    def _next(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _alternatives(self) -> _Group:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return _Group(tuple(options))

    def _sequence(self) -> tuple[_Node, ...]:
        found: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            one = self._one()
            counts = self._counts()
            if counts is not None:
                if isinstance(one, _Edge):
                    raise self._error("nothing to repeat")
                one = self._repeated(one, *counts)
            found.append(one)
        return tuple(found)

    def _repeated(self, one: Expr | _Group, least: int, most: int | None) -> Expr:
        part = _Edges.none_in(one)
        if self._take("?"):
            pass  # as few as possible: the same texts
        elif self._next() == "+":
            raise self._error("possessive repetition is not supported")
        if self._counts() is not None:
            raise self._error("nothing to repeat")
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        end = self._text.find("}", self._at)
        if self._next() != "{" or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not low.isdecimal() or (high and not high.isdecimal()):
            return None  # a bracket that stands for itself
        least, most = int(low), int(high) if high else (None if comma else int(low))
        if max(least, most or 0) > MAX_COUNT or (most is not None and most < least):
            raise self._error(f"counts go up to {MAX_COUNT:,}, the first no higher than the second")
        self._at = end + 1
        return least, most

    def _one(self) -> _Node:
        char = self._next()
        if char in "*+?" or (char == "{" and self._counts() is not None):
            raise self._error("nothing to repeat")
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char in "^$":
            return _Edge(start=char == "^")
        return DOT if char == "." else Text(self._character(char))

    def _character(self, char: str) -> str:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self._error("half of a surrogate pair is no character")
        return char

    def _group(self) -> _Group:
        start = self._at
        if self._take("?"):
            named = self._take("P<") or (self._next() == "<" and self._next(2) not in ("<=", "<!") and self._take("<"))
            if named:
                self._at = self._text.find(">", self._at) + 1 or len(self._text)
            elif not self._take(":"):
                raise self._error("only (…), (?:…) and (?<name>…) are supported: no look-around, no flags")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels of brackets")
        group = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            self._at = start
            raise self._error("this bracket is not closed")
        return group

    def _escape(self) -> Expr | _Edge:
        char = self._next()
        if char in ("A", "z", "Z"):
            self._at += 1
            return _Edge(start=char == "A")
        found = self._escaped()
        return found if isinstance(found, Chars) else Text(chr(found))

    def _escaped(self) -> Chars | int:
        """What follows a backslash, in or out of a class."""
        char = self._next()
        self._at += 1
        if char in _SETS and char:
            return _SETS[char]
        if char in _CONTROLS and char and not (char == "0" and self._next().isdecimal()):
            return _CONTROLS[char]
        if char == "c" and self._next().isascii() and self._next().isalpha():
            self._at += 1
            return ord(self._text[self._at - 1]) % 32
        if char in ("x", "u", "U") and char:
            return self._code_point(char)
        if char and (char in _PLAIN or ord(char) > 127):
            return ord(self._character(char))
        self._at -= 1
        raise self._error(f"\\{char} is not supported" if char else "a backslash at the end")

    def _code_point(self, char: str) -> int:
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits, after = self._text[self._at : max(end, 0)], end + 1
        else:
            size = {"x": 2, "u": 4, "U": 8}[char]
            digits, after = self._next(size), self._at + size
            if len(digits) < size:
                digits = ""
        code = int(digits, 16) if digits and all(one in "0123456789abcdefABCDEF" for one in digits[:9]) else LAST + 1
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", after):  # a pair, as JavaScript writes it
            self._at = after + 2
            low = self._next(4)
            if len(low) == 4 and low[:2].lower() in ("dc", "dd", "de", "df") and low.isalnum():
                self._at += 4
                return 0x10000 + ((code - 0xD800) << 10) + int(low, 16) - 0xDC00
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"\\{char} needs the hexadecimal number of a character")
        self._at = after
        return code

    def _class(self) -> Chars:
        start = self._at
        negated = self._take("^")
        ranges = list[Range]()
        while not self._take("]"):
            if self._next() in ("", "[") or self._next(2) in ("&&", "--", "~~", "||"):
                whole = self._next()
                self._at = self._at if whole else start
                raise self._error("write \\[ and \\& for these in a class" if whole else "this class is not closed")
            low = self._member()
            if self._next() == "-" and self._next(2) not in ("-]", "-"):
                self._at += 1
                low = self._span(low, self._member())
            ranges += low.ranges if isinstance(low, Chars) else [(low, low)]
        if not ranges and not negated:
            raise self._error("a class of no characters")
        found = chars(ranges)
        return others(found) if negated else found

    def _member(self) -> Chars | int:
        char = self._next()
        self._at += 1
        if char == "\\":
            if self._next() == "b":
                self._at += 1
                return 0x08
            return self._escaped()
        return ord(self._character(char)) if char else 0

    def _span(self, low: Chars | int, high: Chars | int) -> Chars:
        if isinstance(low, Chars) or isinstance(high, Chars) or high < low:
            raise self._error("a range goes from one character to a later one")
        return chars([(low, high)])


class _Edges:
    """Where a text begins and ends: `^` and `$` count there alone, and elsewhere they are refused."""

    def __init__(self, anywhere: bool):
        self._more = Repeat(ANY, 0, None) if anywhere else EMPTY

    def resolve(self, nodes: tuple[_Node, ...]) -> list[Expr]:
        """One alternative of the whole pattern, as alternatives without edges."""
        if len(nodes) == 1 and isinstance(nodes[0], _Group):
            return [expr for option in nodes[0].options for expr in self.resolve(option)]
        for at in (0, -1):
            group = nodes[at] if nodes else None
            if isinstance(group, _Group) and self._has_edge(group):
                return [
                    expr
                    for option in group.options
                    for expr in self.resolve((*option, *nodes[1:]) if at == 0 else (*nodes[:-1], *option))
                ]
        first, last = 0, len(nodes)
        while first < last and nodes[first] == _Edge(start=True):
            first += 1
        while first < last and nodes[last - 1] == _Edge(start=False):
            last -= 1
        parts = [self.none_in(node) for node in nodes[first:last]]
        return [seq([*([] if first else [self._more]), *parts, *([] if last < len(nodes) else [self._more])])]

    def _has_edge(self, group: _Group) -> bool:
        nodes = [node for option in group.options for node in option]
        return any(isinstance(node, _Edge) or (isinstance(node, _Group) and self._has_edge(node)) for node in nodes)

    @classmethod
    def none_in(cls, node: _Node) -> Expr:
        if isinstance(node, _Edge):
            raise GrammarError("regular expression: ^ and $ are supported at its two ends alone")
        if isinstance(node, _Group):
            return alt(seq(cls.none_in(one) for one in option) for option in node.options)
        return node
