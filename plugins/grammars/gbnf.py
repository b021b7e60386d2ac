"""EBNF as llama.cpp and xgrammar write it (GBNF), to rules: `root ::= "yes" | [a-z]+ rest`.

A rule ends where the next one begins; comments go from # to the end of the line; a dot is any character.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.grammar.regex import characters
from core.stages.grammar import GrammarError
from plugins.grammars.rules import (
    ANY,
    MAX_DEPTH,
    Expr,
    Ref,
    Repeat,
    Rules,
    Text,
    alt,
    chars,
    others,
    seq,
)

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|\#[^\n]*)|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<is>::=)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<chars>\[\^?(?:[^\]\\\n]|\\.)*\])|(?P<count>\{[ ]*(?:[0-9]{1,9})?[ ]*(?:,[ ]*(?:[0-9]{1,9})?[ ]*)?\})"""
    r"""|(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPED = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "b": 0x08, "0": 0x00}
_PLAIN = "\"'\\[]^-/.{}()|*+?$"
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CALLS = ("Regex", "TagDispatch", "Token")  # of xgrammar
MAX_COUNT = 100_000


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def parse_gbnf(source: str) -> Rules:
    """Raises GrammarError with line and column."""
    return _Parser(source).rules()


class _Parser:
    def __init__(self, source: str):
        self._source = source
        self._tokens = self._scanned()
        self._at = 0
        self._depth = 0

    def rules(self) -> Rules:
        found: dict[str, Expr] = {}
        while not self._is("end"):
            name = self._expect("name", "the name of a rule")
            if name.text in found:
                raise self._error(f"a second rule named {name.text}", name)
            self._expect("is", "::=")
            found[name.text] = self._alternatives()
        if "root" not in found:
            raise GrammarError("there is no rule named root: write root ::= …")
        return found

    def _scanned(self) -> list[_Token]:
        found, at = list[_Token](), 0
        while at < len(self._source):
            match = _TOKEN.match(self._source, at)
            if match is None:
                raise self._error("nothing of a grammar begins here", _Token("", "", at))
            if match.lastgroup != "skip":
                found.append(_Token(match.lastgroup or "", match.group(), at))
            at = match.end()
        end = _Token("end", "", len(self._source))
        return [*found, end, end]

    def _is(self, kind: str, text: str = "", ahead: int = 0) -> bool:
        token = self._tokens[self._at + ahead]
        return token.kind == kind and text in ("", token.text)

    def _expect(self, kind: str, what: str) -> _Token:
        token = self._tokens[self._at]
        if token.kind != kind:
            raise self._error(f"{what} is expected here", token)
        self._at += 1
        return token

    def _error(self, what: str, token: _Token) -> GrammarError:
        line = self._source.count("\n", 0, token.at) + 1
        column = token.at - self._source.rfind("\n", 0, token.at)
        return GrammarError(f"line {line}, column {column}: {what}")

    def _alternatives(self) -> Expr:
        options = [self._sequence()]
        while self._is("sign", "|"):
            self._at += 1
            options.append(self._sequence())
        return alt(options)

    def _sequence(self) -> Expr:
        parts: list[Expr] = []
        while not (self._is("end") or self._is("sign", "|") or self._is("sign", ")") or self._begins_rule()):
            parts.append(self._repeated())
        return seq(parts)

    def _begins_rule(self) -> bool:
        return self._is("name") and self._is("is", ahead=1)

    def _repeated(self) -> Expr:
        one = self._one()
        counts = self._repetition()
        if counts is None:
            return one
        token = self._tokens[self._at]
        if self._repetition() is not None:
            raise self._error("put brackets around what is repeated twice", token)
        return Repeat(one, *counts)

    def _repetition(self) -> tuple[int, int | None] | None:
        token = self._tokens[self._at]
        if token.kind == "count":
            counts = self._counts(token)
        elif token.kind == "sign" and token.text in _COUNTS:
            counts = _COUNTS[token.text]
        else:
            return None
        self._at += 1
        return counts

    def _counts(self, token: _Token) -> tuple[int, int | None]:
        low, comma, high = token.text.strip("{}").replace(" ", "").partition(",")
        least = int(low or 0)
        most = int(high) if high else (None if comma else least)
        if not (low or high) or max(least, most or 0) > MAX_COUNT or (most is not None and most < least):
            raise self._error(f"counts go up to {MAX_COUNT:,}, the first no higher than the second", token)
        return least, most

    def _one(self) -> Expr:
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "text":
            return Text("".join(chr(code) for code in self._codes(token, 1, -1)))
        if token.kind == "chars":
            return self._class(token)
        if token.kind == "name":
            if token.text in _CALLS and self._is("sign", "("):
                raise self._error(f"{token.text}(…) is not supported", token)
            return Ref(token.text)
        if token.text == ".":
            return ANY
        if token.text == "(":
            return self._group(token)
        raise self._error(
            "nothing to repeat" if token.text in _COUNTS or token.kind == "count" else "unexpected", token
        )

    def _group(self, opening: _Token) -> Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels of brackets", opening)
        found = self._alternatives()
        self._depth -= 1
        if not self._is("sign", ")"):
            raise self._error("this bracket is not closed", opening)
        self._at += 1
        return found

    def _class(self, token: _Token) -> Expr:
        negated = token.text.startswith("[^")
        codes = self._codes(token, 2 if negated else 1, -1)
        raw = self._dashes(token, 2 if negated else 1)
        ranges, at = list[tuple[int, int]](), 0
        while at < len(codes):
            if raw[at + 1 : at + 2] == [True] and at + 2 < len(codes):
                ranges.append((codes[at], codes[at + 2]))
                at += 3
            else:
                ranges.append((codes[at], codes[at]))
                at += 1
        if any(low > high for low, high in ranges):
            raise self._error("a range goes from one character to a later one", token)
        found = chars(ranges)
        return others(found) if negated else found

    def _dashes(self, token: _Token, start: int) -> list[bool]:
        """Which characters of a class are a - that is not escaped."""
        return [match.group() == "-" for match in _ESCAPE.finditer(token.text[start:-1])]

    def _codes(self, token: _Token, start: int, end: int) -> list[int]:
        return [self._code(match, token) for match in _ESCAPE.finditer(token.text[start:end])]

    def _code(self, match: re.Match[str], token: _Token) -> int:
        short, medium, long, escaped, plain = match.groups()
        digits = short or medium or long
        code = int(digits, 16) if digits else ord(plain or escaped)
        if escaped:
            if escaped not in _ESCAPED and escaped not in _PLAIN:
                raise self._error(f"\\{escaped} is not supported", token)
            code = _ESCAPED.get(escaped, code)
        if not characters.contains(characters.ALL, code):
            raise self._error("half of a surrogate pair is no character", token)
        return code
