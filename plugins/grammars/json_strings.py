"""Strings of JSON as rules: which characters stand for themselves, and how the others are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from plugins.grammars.rules import (
    ANY,
    NOTHING,
    Alt,
    Chars,
    Expr,
    Followed,
    Ref,
    Repeat,
    Seq,
    Text,
    alt,
    chars,
    minus,
    seq,
)

_ESCAPED = chars([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_PLAIN = minus(ANY, _ESCAPED)
_HEX = chars([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
_D = alt([Text("d"), Text("D")])
_SHORT = seq([Text("\\"), chars([(ord(one), ord(one)) for one in '"\\bfnrt'])])
_NOT_D = minus(_HEX, chars([(0x44, 0x44), (0x64, 0x64)]))
_UNIT = alt([seq([_NOT_D, Repeat(_HEX, 3, 3)]), seq([_D, chars([(0x30, 0x37)]), Repeat(_HEX, 2, 2)])])
_HIGH = seq([_D, chars([(0x38, 0x39), (0x41, 0x42), (0x61, 0x62)]), Repeat(_HEX, 2, 2)])
_LOW = seq([_D, chars([(0x43, 0x46), (0x63, 0x66)]), Repeat(_HEX, 2, 2)])
CHARACTER = alt([_PLAIN, _SHORT, seq([Text("\\u"), _UNIT]), seq([Text("\\u"), _HIGH, Text("\\u"), _LOW])])
"""One code point in any of its spellings; half of a surrogate pair is none (RFC 8259, 8.2)."""
AFTER = seq([Ref("space"), chars([(ord(one), ord(one)) for one in ",:]}"])])
REST = Followed(alt([Text('"'), seq([CHARACTER, Ref("rest")])]), AFTER)
"""What rules of the name `rest` are, and what comes after it; `space` is white space between tokens."""
STRING = seq([Text('"'), Ref("rest")])


def quoted(text: str) -> str:
    """The one spelling of a text that is told apart from others."""
    return json.dumps(text, ensure_ascii=False)


def encoded(expr: Expr) -> Expr:
    """What a string contains whose value is in `expr`, each character in one spelling."""
    match expr:
        case Text(text):
            return Text(quoted(text)[1:-1])
        case Chars():
            return _spelt(expr)
        case Seq(parts):
            return seq(encoded(part) for part in parts)
        case Alt(options):
            return alt(encoded(option) for option in options)
        case Repeat(part, least, most):
            return Repeat(encoded(part), least, most)
    return expr


def _spelt(one: Chars) -> Expr:
    found = [minus(one, _ESCAPED)]
    escaped = minus(one, _PLAIN).ranges
    return alt([*found, *(Text(quoted(chr(code))[1:-1]) for low, high in escaped for code in range(low, high + 1))])


PLAIN = Followed(alt([Text('"'), seq([_spelt(ANY), Ref("plain")])]), AFTER)
"""The rest of a string in its one spelling; what rules of the name `plain` are."""


class Names:
    """Strings that are none of some names: a tree of the characters that the names begin with."""

    def __init__(self, names: Sequence[str], named: Callable[[Expr], Ref]):
        self._named = named
        self._names = sorted(names)

    def expr(self) -> Expr:
        return seq([Text('"'), self._after("", self._names)])

    def _after(self, start: str, names: Sequence[str]) -> Expr:
        """What may follow `start`, with which `names` begin."""
        following: dict[str, list[str]] = {}
        for name in names:
            if len(name) > len(start):
                following.setdefault(name[len(start)], []).append(name)
        free = minus(ANY, chars([(ord(one), ord(one)) for one in following]))
        branches = [seq([encoded(Text(one)), self._after(start + one, more)]) for one, more in following.items()]
        end = NOTHING if start in names else Text('"')
        return self._named(Followed(alt([end, seq([_spelt(free), Ref("plain")]), *branches]), AFTER))
