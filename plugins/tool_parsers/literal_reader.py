"""Keyword arguments in Python's notation, `a=1, b="x", c=[True, None])`, read piece by piece and told as JSON.

A reader of literals of our own: nothing is evaluated or parsed as code, each character is read once, and nesting is bounded.
Texts (in either quote, with Python's escapes), numbers as JSON has them, True, False and None (JSON's words too), lists, and
dicts whose keys are texts. Anything else is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from plugins.tool_parsers.json_reader import MAX_DEPTH, MAX_NUMBER_CHARS

MAX_WORD_CHARS = 256  # of a keyword
MAX_CODE = 0x10FFFF  # of a character

# One class of characters each, so that a match never tries another way.
_BLANK = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"\w*")  # letters of any script, as Python's names have them
_DIGITS = re.compile(r"[-+.0-9eE]*")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")  # of at most MAX_NUMBER_CHARS

_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = dict(zip("\\'\"abfnrtv\n", ("\\", "'", '"', "\a", "\b", "\f", "\n", "\r", "\t", "\v", ""), strict=True))
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_OCTAL = frozenset("01234567")

Step = Callable[[str, int], int]


class KeywordReader:
    """All up to the closing parenthesis. `feed` it until it is `done` or has `failed`.

    `certain`: the first value has begun, or there is none. `held`: what was read and is not told yet.
    """

    def __init__(self) -> None:
        self.certain = False
        self.done = False
        self.failed = False
        self._told: list[str] = []  # JSON that is new
        self._tells = False  # this step does
        self._held: list[str] = []
        self._lead = "{"  # JSON before what is told next
        self._keywords: set[str] = set()
        self._is_spread = False  # the arguments are one dict: **{…}
        self._open: list[str] = []  # closing brackets of the containers around this place
        self._read: Step = self._read_argument
        self._word = ""  # a keyword, a literal, digits, or an escape, as far as it has come
        self._quote = ""
        self._is_key = False  # of the text in hand

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`. The index of the first character that is not part of it, or the length."""
        while at < len(text) and not (self.done or self.failed):
            start, at = at, self._read(text, at)
            if self._tells:
                self._held, self._tells = [], False
            else:
                self._held.append(text[start:at])
        return at

    def new_json(self) -> str:
        told, self._told = "".join(self._told), []
        return told

    @property
    def held(self) -> str:
        return "".join(self._held)

    def _tell(self, told: str) -> None:
        """All that was read up to the end of this step is in it."""
        self._told += [self._lead, told]
        self._lead, self._tells = "", True

    def _tell_value(self, told: str) -> None:
        self.certain = True
        self._tell(told)

    def _go(self, read: Step, at: int) -> int:
        self._read = read
        return at

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    # --- between the arguments ---

    def _read_argument(self, text: str, at: int) -> int:
        """After the parenthesis, or a comma."""
        at = _end_of(_BLANK, text, at)
        if at == len(text):
            return at
        if text[at] == ")":
            return self._end(at)
        if text[at] == "*" and not self._keywords:
            return self._go(self._read_star, at + 1)
        self._word = ""
        return self._go(self._read_keyword, at) if text[at].isalpha() or text[at] == "_" else self._fail(at)

    def _read_keyword(self, text: str, at: int) -> int:
        end = self._take(_WORD, text, at, MAX_WORD_CHARS)
        return self._go(self._read_equals, end) if end < len(text) else end

    def _read_equals(self, text: str, at: int) -> int:
        at = _end_of(_BLANK, text, at)
        if at == len(text):
            return at
        if text[at] != "=" or not self._word or self._word in self._keywords:
            return self._fail(at)
        self._lead += f'{", " if self._keywords else ""}"{self._word}": '
        self._keywords.add(self._word)
        return self._go(self._read_value, at + 1)

    def _read_star(self, text: str, at: int) -> int:
        return self._go(self._read_spread, at + 1) if text[at] == "*" else self._fail(at)

    def _read_spread(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._is_spread = True
        self._open.append("}")
        return self._go(self._read_first, at + 1)

    def _end(self, at: int) -> int:
        self._tell_value("" if self._is_spread else "}")
        self.done = True
        return at + 1

    # --- values ---

    def _read_value(self, text: str, at: int) -> int:
        at = _end_of(_BLANK, text, at)
        return self._begin_value(text, at) if at < len(text) else at

    def _begin_value(self, text: str, at: int) -> int:
        char, self._word = text[at], ""
        if char in "-0123456789":
            return self._go(self._read_number, at)
        if char.isalpha():
            return self._go(self._read_literal, at)
        if char in _PLAIN:
            return self._begin_text(char, at, is_key=False)
        if char not in "{[" or len(self._open) >= MAX_DEPTH - 1:
            return self._fail(at)
        self._open.append("}" if char == "{" else "]")
        self._tell_value(char)
        return self._go(self._read_first, at + 1)

    def _read_first(self, text: str, at: int) -> int:
        """After an opening bracket, or a comma inside."""
        at = _end_of(_BLANK, text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        if self._open[-1] == "]":
            return self._begin_value(text, at)
        return self._begin_text(text[at], at, is_key=True) if text[at] in _PLAIN else self._fail(at)

    def _read_next(self, text: str, at: int) -> int:
        """After a value."""
        at = _end_of(_BLANK, text, at)
        if at == len(text):
            return at
        if self._open and text[at] == self._open[-1]:
            return self._close(at)
        if not self._open and text[at] == ")":
            return self._end(at)
        if text[at] != "," or (self._is_spread and not self._open):
            return self._fail(at)
        if not self._open:
            return self._go(self._read_argument, at + 1)
        self._lead = ", "
        return self._go(self._read_first, at + 1)

    def _close(self, at: int) -> int:
        if self._lead == ", ":
            self._lead = ""  # a comma after the last one
        self._tell_value(self._open.pop())
        return self._go(self._read_next, at + 1)

    def _read_number(self, text: str, at: int) -> int:
        start, end = at, self._take(_DIGITS, text, at, MAX_NUMBER_CHARS)
        if end > start:
            self._tell_value(text[start:end])
        if end == len(text) or self.failed:
            return end
        return self._go(self._read_next, end) if _NUMBER.fullmatch(self._word) else self._fail(end)

    def _read_literal(self, text: str, at: int) -> int:
        end = self._take(_WORD, text, at, len("False"))
        if end == len(text) or self.failed:
            return end
        if self._word not in _LITERALS:
            return self._fail(end)
        self._tell_value(_LITERALS[self._word])
        return self._go(self._read_next, end)

    def _take(self, pattern: re.Pattern[str], text: str, at: int, most: int) -> int:
        """Into `_word`, which has no more than so many characters."""
        end, last = _end_of(pattern, text, at), at + most - len(self._word)
        self._word += text[at : min(end, last)]
        return self._fail(last) if end > last else end

    # --- texts ---

    def _begin_text(self, quote: str, at: int, *, is_key: bool) -> int:
        self._quote, self._is_key = quote, is_key
        if is_key:
            self._tell('"')
        else:
            self._tell_value('"')
        return self._go(self._read_text, at + 1)

    def _read_text(self, text: str, at: int) -> int:
        end = _end_of(_PLAIN[self._quote], text, at)
        if end > at:
            self._tell(_inside(text[at:end]))
            return end
        if text[at] == "\\":
            self._word = ""
            return self._go(self._read_escape, at + 1)
        self._tell('"')
        return self._go(self._read_colon if self._is_key else self._read_next, at + 1)

    def _read_colon(self, text: str, at: int) -> int:
        at = _end_of(_BLANK, text, at)
        if at == len(text):
            return at
        self._lead = ": "
        return self._go(self._read_value, at + 1) if text[at] == ":" else self._fail(at)

    def _read_escape(self, text: str, at: int) -> int:
        char = text[at]
        self._word = char
        if char in _HEX_DIGITS:
            return self._go(self._read_hex, at + 1)
        if char in _OCTAL:
            return self._go(self._read_octal, at + 1)
        self._tell(_inside(_ESCAPES.get(char, "\\" + char)))
        return self._go(self._read_text, at + 1)

    def _read_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self._word += text[at]
        if len(self._word) <= _HEX_DIGITS[self._word[0]]:
            return at + 1
        code = int(self._word[1:], 16)
        if code > MAX_CODE:
            return self._fail(at)
        self._tell(_inside(chr(code)))
        return self._go(self._read_text, at + 1)

    def _read_octal(self, text: str, at: int) -> int:
        """Up to three digits."""
        if text[at] in _OCTAL and len(self._word) < 3:
            self._word += text[at]
            return at + 1
        self._tell(_inside(chr(int(self._word, 8))))
        return self._go(self._read_text, at)


def _inside(text: str) -> str:
    """As it stands in a JSON text; halves of surrogate pairs as escapes."""
    return json.dumps(text, ensure_ascii="\ud800" <= text[:1] <= "\udfff")[1:-1]


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None  # each of them matches nothing at all
    return match.end()
