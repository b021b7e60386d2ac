"""What notations of regular expressions do not agree on. What is not in a dialect is refused: no guess about what another one
means by it."""

from __future__ import annotations

from dataclasses import dataclass

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges


@dataclass(frozen=True, slots=True)
class Dialect:
    space: Ranges  # \s
    dot: Ranges
    max_repeat: int  # of a count
    looks_ahead: bool  # (?=…) and (?!…)
    empty_class: bool  # [] is no character
    brace_is_literal: bool  # a { that begins no count
    class_operators: bool  # what means something in a class in some notations is refused there: [ && -- ~~ ||
    text_edges: bool  # \A, and \z and \Z, are the ends of the text
    long_escapes: bool  # \x{…} and \U followed by eight digits
    python_names: bool  # (?P<name>…)
    properties: bool  # \p{…}


ECMA = Dialect(
    space=characters.SPACE,
    dot=characters.complement(characters.LINE_END),
    max_repeat=4096,
    looks_ahead=True,
    empty_class=True,
    brace_is_literal=False,
    class_operators=False,
    text_edges=False,
    long_escapes=False,
    python_names=False,
    properties=True,
)
"""ECMA 262 with the characters and properties of its flag u, as JSON Schema has it."""

COMMON = Dialect(
    space=((0x09, 0x0D), (0x20, 0x20)),
    dot=characters.complement(((0x0A, 0x0A),)),
    max_repeat=100_000,
    looks_ahead=False,
    empty_class=False,
    brace_is_literal=True,
    class_operators=True,
    text_edges=True,
    long_escapes=True,
    python_names=True,
    properties=False,
)
"""What ECMA's, Python's and Rust's agree on, with the classes of ASCII, and each one's own way to write what the others have."""
