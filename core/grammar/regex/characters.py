"""Sets of characters, as ranges of code points. Surrogates are in none: no text has them."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

Ranges = tuple[tuple[int, int], ...]
"""First and last code point of each range, ascending, with a gap between any two."""

LAST = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
PYTHON_SPACE: Ranges = (
    (0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
ASCII_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    found, i, j = list[tuple[int, int]](), 0, 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            found.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    gaps, start = list[tuple[int, int]](), 0
    for first, last in ranges:
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= LAST:
        gaps.append((start, LAST))
    return intersection(tuple(gaps), ALL)


def contains(ranges: Ranges, point: int) -> bool:
    at = bisect_right(ranges, (point, LAST)) - 1
    return at >= 0 and ranges[at][0] <= point <= ranges[at][1]


def of_text(text: str) -> Ranges:
    return union((ord(letter), ord(letter)) for letter in text)


_EMPTY_PLANES = (0x40000, 0xDFFFF)
_PRIVATE = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
_NO_CHARACTERS = ((0xFFFFE, 0xFFFFF), (0x10FFFE, 0x10FFFF))


@lru_cache(maxsize=1)
def _by_category() -> dict[str, Ranges]:
    """Takes some 50 milliseconds: planes that have one category are not looked through."""
    found = {"Cn": [_EMPTY_PLANES, *_NO_CHARACTERS], "Co": list(_PRIVATE)}
    for point in chain(range(_EMPTY_PLANES[0]), range(_EMPTY_PLANES[1] + 1, _PRIVATE[0][0])):
        runs = found.setdefault(unicodedata.category(chr(point)), [])
        if runs and runs[-1][1] == point - 1:
            runs[-1] = (runs[-1][0], point)
        else:
            runs.append((point, point))
    return {name: union(runs) for name, runs in found.items()}


def of_categories(*prefixes: str) -> Ranges:
    """Unassigned code points are of category `Cn`."""
    return union(span for name, spans in _by_category().items() if name.startswith(prefixes) for span in spans)


CATEGORY_NAMES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm",
    "Other_Letter": "Lo", "Mark": "M", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Symbol": "S", "Separator": "Z", "Space_Separator": "Zs",
    "Other": "C", "Control": "Cc",
}  # fmt: skip


def of_property(name: str) -> Ranges | None:
    """What `\\p{name}` is, for general categories; None for others."""
    name = name.removeprefix("gc=").removeprefix("General_Category=")
    if name == "Any":
        return ALL
    if name == "ASCII":
        return ((0, 0x7F),)
    short = CATEGORY_NAMES.get(name, name)
    if len(short) not in (1, 2):
        return None
    return intersection(of_categories(short), ALL) or None
