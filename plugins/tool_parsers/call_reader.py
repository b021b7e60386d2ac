"""One call, piece by piece: what every reader of a call says of it, and the readers of calls with JSON arguments."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Protocol

from plugins.tool_parsers.json_reader import WHITE_SPACE, JsonReader

MAX_KEY_CHARS = 16  # of the call's own keys
MAX_NAME_CHARS = 256

Scan = Generator[None, str, None]
Ahead = Generator[None, str, str]  # returns the first character after what it read


class NotACallError(ValueError):
    """The character does not go on with a call."""


class Reader(Protocol):
    """One call. `feed` it until it is `done` or has `failed`.

    `certain`: a value in its arguments has begun (or they are empty), so that it may be told once it has a name. Before that,
    what is wrong can still become content as a whole.
    """

    name: str | None  # of a known tool
    call_id: str | None
    done: bool
    failed: bool

    @property
    def certain(self) -> bool: ...

    @property
    def text(self) -> str:
        """All that was read."""
        ...

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`. The index of the first character that is not part of the call, or the length."""
        ...

    def new_arguments(self) -> str:
        """JSON text of the arguments that came since the last call of this; "{}" for a call that is done and has none."""
        ...

    def after_arguments(self) -> str:
        """What was read after the arguments that were told."""
        ...


class ValueReader(Protocol):
    """Arguments, or a part of them. `feed` as of `Reader`."""

    certain: bool
    done: bool
    failed: bool

    @property
    def held(self) -> str:
        """What was read and is not told as JSON yet."""
        ...

    def feed(self, text: str, at: int) -> int: ...

    def new_json(self) -> str: ...


class ScannedCall:
    """A call whose arguments a `ValueReader` reads, and `scan`, character by character, the text around. See `Reader`."""

    def __init__(self, names: Collection[str]):
        self.name: str | None = None
        self.call_id: str | None = None
        self.done = False
        self.failed = False
        self.names = names
        self._text: list[str] = []
        self._value: ValueReader | None = None  # of the arguments, while it is read
        self._begun = False  # the arguments
        self._certain = False
        self._arguments: list[str] = []  # new ones
        self._after: list[str] = []
        self._is_scanned = False  # all that `scan` takes
        self._scan = self.scan()
        next(self._scan)

    def scan(self) -> Scan:
        """Takes all characters but those of the arguments, which may be the last. Calls `begin_arguments` and `note_name`;
        raises NotACallError."""
        raise NotImplementedError

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.done or self.failed):
            at = self._feed_char(text[at], at) if self._value is None else self._feed_value(self._value, text, at)
        return at

    @property
    def certain(self) -> bool:
        return self._certain or self.done

    @property
    def text(self) -> str:
        return "".join(self._text)

    def new_arguments(self) -> str:
        if not self._begun:
            return "{}" if self.done else ""
        new, self._arguments = "".join(self._arguments), []
        return new

    def after_arguments(self) -> str:
        return (self._value.held if self._value else "") + "".join(self._after)

    def begin_object(self, char: str) -> None:
        """`char` begins arguments that are JSON."""
        expect(char, "{")
        reader = JsonReader()
        reader.feed(char, 0)
        self.begin_arguments(reader)

    def begin_arguments(self, reader: ValueReader) -> None:
        """The next character that `scan` is sent is the first one behind them."""
        self._begun, self._value = True, reader

    def note_name(self, name: str) -> None:
        if name not in self.names:
            raise NotACallError
        self.name = name

    def _feed_char(self, char: str, at: int) -> int:
        try:
            self._scan.send(char)
        except StopIteration:
            self._is_scanned = True
            self.done = self._value is None
        except NotACallError:
            self.failed = True
            return at
        self._text.append(char)
        if self._begun and self._value is None:
            self._after.append(char)
        return at + 1

    def _feed_value(self, value: ValueReader, text: str, at: int) -> int:
        end = value.feed(text, at)
        self._text.append(text[at:end])
        self._arguments.append(value.new_json())
        self._certain, self.failed = value.certain, value.failed
        if value.done:
            self._value, self.done = None, self._is_scanned
        return end


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of a call's object beside `name`."""

    arguments: tuple[str, ...] = ("arguments",)  # any one of these
    call_id: str = ""
    idle: tuple[str, ...] = ()  # with a short text that says nothing
    needs_arguments: bool = False


class CallReader(ScannedCall):
    """A call that is `{"name": …, "arguments": {…}}`, its keys in any order."""

    def __init__(self, names: Collection[str], keys: CallKeys):
        self._keys = keys
        super().__init__(names)

    def scan(self) -> Scan:
        expect((yield from visible((yield))), "{")
        char = yield from visible((yield))
        seen: set[str] = set()
        while True:
            key = self._kind_of((yield from _short_string(char, MAX_KEY_CHARS)))
            if key in seen:
                raise NotACallError
            seen.add(key)
            expect((yield from visible((yield))), ":")
            char = yield from visible((yield))
            if key == "arguments":
                self.begin_object(char)
            else:
                self._note(key, (yield from _word(char)))
            char = yield from visible((yield))
            if char == "}":
                break
            expect(char, ",")
            char = yield from visible((yield))
        if "name" not in seen or (self._keys.needs_arguments and "arguments" not in seen):
            raise NotACallError

    def _kind_of(self, key: str) -> str:
        if key in self._keys.arguments:
            return "arguments"
        if key not in ("name", self._keys.call_id, *self._keys.idle):
            raise NotACallError
        return "call_id" if key == self._keys.call_id else key

    def _note(self, key: str, word: str) -> None:
        if key == "name":
            self.note_name(word)
        elif key == "call_id" and not self._begun:  # once there are arguments, the call may have been told without it
            self.call_id = word


def expect(char: str, expected: str) -> None:
    if char != expected:
        raise NotACallError


def visible(char: str) -> Ahead:
    """`char`, or the first one after white space."""
    while char in WHITE_SPACE:
        char = yield
    return char


def _short_string(char: str, limit: int) -> Generator[None, str, str]:
    """The decoded text, its last quote read."""
    expect(char, '"')
    raw, reader = [char], JsonReader()
    reader.feed(char, 0)
    while not reader.done:
        char = yield
        raw.append(char)
        reader.feed(char, 0)
        if reader.failed or len(raw) > limit + 2:
            raise NotACallError
    return str(json.loads("".join(raw)))


def _word(char: str) -> Generator[None, str, str]:
    """A text that can be told."""
    word = yield from _short_string(char, MAX_NAME_CHARS)
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, by its escape
        raise NotACallError from None
    if not word:
        raise NotACallError
    return word
