"""One JSON value, read piece by piece: strict, in time linear in the text, and never deeper than `MAX_DEPTH`.

Nothing is evaluated and nothing is matched backwards: the reader stands at one place of the grammar and goes on or refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable

WHITE_SPACE = " \t\n\r"
MAX_DEPTH = 128
MAX_NUMBER_CHARS = 1024

# One class of characters each, so that a match never tries another way.
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")  # of at most MAX_NUMBER_CHARS

_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonReader:
    """`feed` it until it is `done` or has `failed`. A number alone is never done: it has no end of its own.

    `certain`: a value inside the first container has begun, or there is none in it. `held`: what was read and is not told;
    nothing, for the text is told as it is.
    """

    held = ""

    def __init__(self) -> None:
        self.certain = False
        self.done = False
        self.failed = False
        self._told: list[str] = []  # that is new
        self._open: list[str] = []  # closing brackets of the containers around this place
        self._read: Callable[[str, int], int] = self._read_value
        self._rest = ""  # of a literal, or of an escape: what must follow
        self._digits = ""
        self._is_key = False  # of the string in hand

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`. The index of the first character that is not part of the value, or the length."""
        start = at
        while at < len(text) and not (self.done or self.failed):
            at = self._read(text, at)
        self._told.append(text[start:at])
        return at

    def new_json(self) -> str:
        """What was read since the last call of this."""
        told, self._told = "".join(self._told), []
        return told

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _read_value(self, text: str, at: int) -> int:
        at = _blank(text, at)
        return self._begin_value(text, at) if at < len(text) else at

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in "-0123456789":
            self._read, self._digits = self._read_number, ""
            at -= 1  # it is read there
        elif char == '"':
            self._read, self._is_key = self._read_string, False
        elif char in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append("}" if char == "{" else "]")
            self._read = self._read_first
        elif char in _LITERALS:
            self._read, self._rest = self._read_literal, _LITERALS[char]
        else:
            return self._fail(at)
        self.certain = self.certain or len(self._open) > (char in "{[")
        return at + 1

    def _read_first(self, text: str, at: int) -> int:
        """What follows an opening bracket."""
        at = _blank(text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        return self._read_key(text, at) if self._open[-1] == "}" else self._begin_value(text, at)

    def _read_key(self, text: str, at: int) -> int:
        at = _blank(text, at)
        if at == len(text):
            self._read = self._read_key
            return at
        if text[at] != '"':
            return self._fail(at)
        self._read, self._is_key = self._read_string, True
        return at + 1

    def _read_colon(self, text: str, at: int) -> int:
        at = _blank(text, at)
        if at == len(text):
            return at
        self._read = self._read_value
        return at + 1 if text[at] == ":" else self._fail(at)

    def _read_next(self, text: str, at: int) -> int:
        """What follows a value."""
        at = _blank(text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._fail(at)
        self._read = self._read_key if self._open[-1] == "}" else self._read_value
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self.certain = True
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._read = self._read_next
        self.done = not self._open

    def _read_string(self, text: str, at: int) -> int:
        at = _plain(text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._read = self._read_escape
        elif text[at] != '"':
            return self._fail(at)
        elif self._is_key:
            self._read = self._read_colon
        else:
            self._end_value()
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        char = text[at]
        if char == "u":
            self._read, self._rest = self._read_hex, "0000"
        elif char in _ESCAPES:
            self._read = self._read_string
        else:
            return self._fail(at)
        return at + 1

    def _read_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._read = self._read_string
        return at + 1

    def _read_literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            return self._fail(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return at + 1

    def _read_number(self, text: str, at: int) -> int:
        end, most = _end_of(_DIGITS, text, at), at + MAX_NUMBER_CHARS - len(self._digits)
        if end > most:
            return self._fail(most)
        self._digits += text[at:end]
        if end < len(text):
            if not _NUMBER.fullmatch(self._digits):
                return self._fail(end)
            self._end_value()
        return end


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None  # each of them matches nothing at all
    return match.end()


def _blank(text: str, at: int) -> int:
    return _end_of(_BLANK, text, at)


def _plain(text: str, at: int) -> int:
    return _end_of(_PLAIN, text, at)
