"""What notations of regular expressions do not agree on. What is not in a dialect is refused: no guess about what another one
means by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges, union


@dataclass(frozen=True, slots=True)
class Dialect:
    num_notations: int
    sets: Callable[
        [str], tuple[Ranges, ...]
    ]  # \d, \w or \s in each: a character is in a class where it is so in all of them
    dot: Ranges
    max_repeat: int  # of a count
    looks_ahead: bool  # (?=…) and (?!…)
    bracket_ends_class: bool  # a ] that is the first in a class: [] is no character, [^] is any
    brace_is_literal: bool  # a { that begins no count
    class_operators: bool  # what means something in a class in some notations is refused there: [ && -- ~~ ||
    text_edges: bool  # \A, and \z and \Z, are the ends of the text
    word_edges: bool  # \< and \> are edges of words in some notations, and refused
    long_escapes: bool  # \x{…} and \U followed by eight digits
    surrogate_pairs: bool  # \ud83d\ude00 is one character
    python_names: bool  # (?P<name>…)
    properties: bool  # \p{…}


_ECMA = {"d": characters.DIGIT, "w": characters.WORD, "s": characters.SPACE}
_OTHER_ALPHABETIC: Ranges = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))  # symbols


@lru_cache(maxsize=3)
def _common_sets(letter: str) -> tuple[Ranges, ...]:
    """ASCII's, so that what is in it is so everywhere, ECMA's, Python's and Rust's."""
    if letter == "s":
        white_space = union((*characters.ASCII_SPACE, *(span for span in characters.PYTHON_SPACE if span[0] > 0x20)))
        return characters.ASCII_SPACE, _ECMA["s"], characters.PYTHON_SPACE, white_space
    if letter == "d":
        digits = characters.of_categories("Nd")
        return characters.DIGIT, _ECMA["d"], digits, digits
    letters = characters.of_categories("L", "N", "Cn")  # what Unicode has not assigned yet may become a letter
    rust_word = union((*letters, *characters.of_categories("M", "Pc"), (0x200C, 0x200D), *_OTHER_ALPHABETIC))
    return characters.WORD, _ECMA["w"], union((*letters, (0x5F, 0x5F))), rust_word


ECMA = Dialect(
    num_notations=1,
    sets=lambda letter: (_ECMA[letter],),
    dot=characters.complement(characters.LINE_END),
    max_repeat=4096,
    looks_ahead=True,
    bracket_ends_class=True,
    brace_is_literal=False,
    class_operators=False,
    text_edges=False,
    word_edges=False,
    long_escapes=False,
    surrogate_pairs=True,
    python_names=False,
    properties=True,
)
"""ECMA 262 with the characters and properties of its flag u, as JSON Schema has it."""

COMMON = Dialect(
    num_notations=4,
    sets=_common_sets,
    dot=characters.complement(characters.LINE_END),
    max_repeat=100_000,
    looks_ahead=False,
    bracket_ends_class=False,
    brace_is_literal=True,
    class_operators=True,
    text_edges=True,
    word_edges=True,
    long_escapes=True,
    surrogate_pairs=False,
    python_names=True,
    properties=False,
)
"""What ECMA's, Python's and Rust's agree on, and each one's own way to write what the others have. A class is the characters that
are in it in all of them, with the sets of Unicode and of ASCII: so is its opposite."""
