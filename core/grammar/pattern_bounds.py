"""Bounds of regular expressions and EBNF: brackets and counted repetitions. No dialect is parsed here, backends do that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.settings import StructuredOutputSettings

NESTED_REPEATS = 16  # times max_repeat: what counted repetitions within each other may come to

_REPEAT = r"\{\s*+(\d*+)\s*+,?\s*+(\d*+)\s*+\}"
_REGEX_TOKEN = re.compile(rf"\\.|{_REPEAT}|.", re.DOTALL)
# A text, a class or a comment without an end takes all that is left: each character is looked at once.
_EBNF_TOKEN = re.compile(
    rf"""(?P<literal>"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|\[(?:[^\]\\]++|\\.)*+(?:\]|\\?\Z)|\#[^\n]*+)|{_REPEAT}"""
    r"|(?P<name>[A-Za-z_][\w.-]*+)|(?P<rule>::=)|\S",
    re.DOTALL,
)


class OutOfBoundsError(Exception):
    """The text says what is too large or malformed; `code` is that of a RequestError."""

    def __init__(self, text: str, code: str = "too_large"):
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class _Repeats:
    """Counted repetitions multiply where they are nested: the largest product inside of each open bracket."""

    limits: StructuredOutputSettings
    open: list[int] = field(default_factory=lambda: [1])
    last: int = 1  # of what a repetition would repeat

    def atom(self) -> None:
        self.last = 1

    def begin(self) -> None:
        self.open.append(1)
        if len(self.open) - 1 > self.limits.max_depth:
            raise _too_deep(self.limits)

    def end(self) -> None:
        if len(self.open) > 1:
            self.last = self.open.pop()
            self.open[-1] = max(self.open[-1], self.last)

    def repeat(self, *bounds: str | None) -> None:
        most = self.limits.max_repeat
        count = max(_count(digits or "", most) for digits in bounds)
        self.last *= max(count, 1)
        if count > most or self.last > most * NESTED_REPEATS:
            within = "" if count > most else f", {NESTED_REPEATS} times that where they are nested"
            raise OutOfBoundsError(
                f"a counted repetition is too large, and {most} is the limit{within} (structured_outputs.max_repeat)"
            )
        self.open[-1] = max(self.open[-1], self.last)


def _too_deep(limits: StructuredOutputSettings) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"brackets are nested too deeply, and {limits.max_depth} is the limit (structured_outputs.max_depth)"
    )


def _count(digits: str, most: int) -> int:
    """The number; more than `most` where it is too long to be read."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= len(str(most)) else most + 1


def check_regex(pattern: str, limits: StructuredOutputSettings) -> None:
    """Raises OutOfBoundsError. A class ends where any dialect may have it end, so what follows is rather counted than not."""
    num_bytes = len(pattern.encode("utf-8", "surrogatepass"))
    if num_bytes > limits.max_pattern:
        raise OutOfBoundsError(
            f"a regular expression has {num_bytes} bytes, and {limits.max_pattern} is the limit (structured_outputs.max_pattern)"
        )
    repeats, num_open = _Repeats(limits), 0  # brackets of a class: some dialects nest them
    for found in _REGEX_TOKEN.finditer(pattern):
        part = found[0]
        if num_open and part != "]":
            num_open += part == "["
            if num_open > limits.max_depth:
                raise _too_deep(limits)
        elif part in ("[", "]"):
            num_open = int(part == "[")
            repeats.atom()
        elif found[1] is not None:
            repeats.repeat(found[1], found[2])
        elif part == "(":
            repeats.begin()
        elif part == ")":
            repeats.end()
        elif part not in "*+?":
            repeats.atom()


def check_ebnf(source: str, limits: StructuredOutputSettings) -> None:
    """Raises OutOfBoundsError, also for brackets that do not match and for a grammar without the rule `root`."""
    repeats, rules, name, num_options = _Repeats(limits), set[str](), "", 1
    for found in _EBNF_TOKEN.finditer(source):
        part = found[0]
        if found["rule"]:
            rules.add(name)
            num_options = 1
        elif found[2] is not None:
            repeats.repeat(found[2], found[3])
        elif part == "(":
            repeats.begin()
        elif part == ")":
            if len(repeats.open) == 1:
                raise OutOfBoundsError(f"{_place(source, found.start())}: ) closes nothing", "invalid_grammar")
            repeats.end()
        elif part not in "*+?":
            num_options += part == "|"
            repeats.atom()
        name = found["name"] or ""
        _check_counts(len(rules), num_options, limits)
    if len(repeats.open) > 1:
        raise OutOfBoundsError(f"{_place(source, len(source))}: a ( is not closed", "invalid_grammar")
    if "root" not in rules:
        raise OutOfBoundsError("the grammar has no rule that is called root: root ::= …", "invalid_grammar")


def _check_counts(num_rules: int, num_options: int, limits: StructuredOutputSettings) -> None:
    if num_rules > limits.max_nodes:
        raise OutOfBoundsError(
            f"the grammar has too many rules, and {limits.max_nodes} is the limit (structured_outputs.max_nodes)"
        )
    if num_options > limits.max_choices:
        raise OutOfBoundsError(
            f"a rule has too many options, and {limits.max_choices} is the limit (structured_outputs.max_choices)"
        )


def _place(source: str, offset: int) -> str:
    line = source.count("\n", 0, offset)
    return f"line {line + 1}, column {offset - (source.rfind(chr(10), 0, offset) + 1) + 1}"
