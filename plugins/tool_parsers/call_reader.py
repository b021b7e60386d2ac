"""One call, `{"name": …, "arguments": {…}}`, read character by character: strict JSON, in time linear in the text.

Nothing is evaluated and nothing is matched backwards: a generator stands at one place of the grammar and takes the next
character or refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

WHITE_SPACE = " \t\n\r"
MAX_DEPTH = 128
MAX_KEY_CHARS = 16  # of the call's own keys
MAX_NAME_CHARS = 256
MAX_NUMBER_CHARS = 1024

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")

Scan = Generator[None, str, None]
Ahead = Generator[None, str, str]  # returns the first character after what it read


class NotACallError(ValueError):
    """The character does not go on with a call."""


class CallReader:
    """`feed` it until it is `done` or `failed`; then `name` and `arguments` are what they are.

    `certain`: a value in the arguments has begun (or they are empty), so that they may be told. Before that, what is wrong
    can still become content as a whole.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.certain = False
        self.done = False
        self.failed = False
        self._text: list[str] = []
        self._start: int | None = None  # of the arguments in the text
        self._end: int | None = None
        self._told = 0  # characters of the arguments
        self._scan = self._call()
        next(self._scan)

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`. The index of the first character that is not part of the call, or the length."""
        send, take = self._scan.send, self._text.append
        for index in range(at, len(text)):
            char = text[index]
            try:
                send(char)
            except StopIteration:
                take(char)
                self.done = True
                return index + 1
            except NotACallError:
                self.failed = True
                return index
            take(char)
        return len(text)

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._text)

    def new_arguments(self) -> str:
        """Those that came since the last call of this; "{}" for a call that is done and has none."""
        if self._start is None:
            return "{}" if self.done else ""
        end = len(self._text) if self._end is None else self._end
        start, self._told = self._start + self._told, end - self._start
        return "".join(self._text[start:end])

    def after_arguments(self) -> str:
        """What was read after them."""
        return "" if self._end is None else "".join(self._text[self._end :])

    def _call(self) -> Scan:
        _expect((yield from _visible((yield))), "{")
        char = yield from _visible((yield))
        keys: set[str] = set()
        while True:
            key = yield from _short_string(char, MAX_KEY_CHARS)
            if key in keys or key not in ("name", "arguments"):
                raise NotACallError
            keys.add(key)
            _expect((yield from _visible((yield))), ":")
            char = yield from _visible((yield))
            if key == "name":
                self.name = yield from _name(char)
            else:
                yield from self._arguments(char)
            char = yield from _visible((yield))
            if char == "}":
                break
            _expect(char, ",")
            char = yield from _visible((yield))
        if self.name is None:
            raise NotACallError

    def _arguments(self, char: str) -> Scan:
        _expect(char, "{")
        self._start = len(self._text)
        yield from self._container(char, 1)
        self._end = len(self._text) + 1
        self.certain = True

    def _container(self, char: str, depth: int) -> Scan:
        """An object or a list, its last character included."""
        if depth > MAX_DEPTH:
            raise NotACallError
        has_keys, close = char == "{", "}" if char == "{" else "]"
        char = yield from _visible((yield))
        if char == close:
            return
        while True:
            if has_keys:
                yield from _string(char)
                _expect((yield from _visible((yield))), ":")
                char = yield from _visible((yield))
            char = yield from _visible((yield from self._value(char, depth)))
            if char == close:
                return
            _expect(char, ",")
            char = yield from _visible((yield))

    def _value(self, char: str, depth: int) -> Ahead:
        if char in "-0123456789":
            self.certain = True
            return (yield from _number(char))
        if char not in '{["tfn':
            raise NotACallError
        self.certain = True
        if char in "{[":
            yield from self._container(char, depth + 1)
        elif char == '"':
            yield from _string(char)
        else:
            for expected in _LITERALS[char]:
                _expect((yield), expected)
        return (yield)


def _expect(char: str, expected: str) -> None:
    if char != expected:
        raise NotACallError


def _visible(char: str) -> Ahead:
    """`char`, or the first one after white space."""
    while char in WHITE_SPACE:
        char = yield
    return char


def _string(char: str) -> Scan:
    """Its last quote included."""
    _expect(char, '"')
    while (char := (yield)) != '"':
        if char < " ":
            raise NotACallError
        if char == "\\":
            yield from _escape()


def _escape() -> Scan:
    char = yield
    if char not in _ESCAPES:
        raise NotACallError
    if char == "u":
        for _ in range(4):
            if (yield) not in _HEX:
                raise NotACallError


def _short_string(char: str, limit: int) -> Generator[None, str, str]:
    """The decoded text."""
    _expect(char, '"')
    raw: list[str] = []
    scan = _string(char)
    next(scan)
    while True:
        char = yield
        raw.append(char)
        if len(raw) > limit:
            raise NotACallError
        try:
            scan.send(char)
        except StopIteration:
            return str(json.loads(f'"{"".join(raw)}'))


def _name(char: str) -> Generator[None, str, str]:
    name = yield from _short_string(char, MAX_NAME_CHARS)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, by its escape
        raise NotACallError from None
    if not name:
        raise NotACallError
    return name


def _number(char: str) -> Ahead:
    digits: list[str] = []
    while char in _NUMBER_CHARS and len(digits) < MAX_NUMBER_CHARS:
        digits.append(char)
        char = yield
    if not _NUMBER.fullmatch("".join(digits)):
        raise NotACallError
    return char
