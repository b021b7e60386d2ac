"""Languages as rules over characters: what regular expressions, EBNF and choices become, and what both backends are written from.

One form of its own, because the backends' notations differ in what a class, a dot or an escape means, and drop what they do not
know. Surrogates are no characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from core.grammar.regex import characters
from core.stages.grammar import GrammarError

MAX_DEPTH = 200
"""Levels of brackets, and of what stands in one rule: what parses and writes rules goes down by calls."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character. Without ranges: none, so nothing matches."""

    ranges: characters.Ranges  # see `chars`


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Expr
    least: int
    most: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Followed:
    """`part`, after which `by` comes wherever it stands, or the end: a hint, on the whole of a rule."""

    part: Expr
    by: Expr


Expr: TypeAlias = Text | Chars | Seq | Alt | Repeat | Ref | Followed
Rules: TypeAlias = Mapping[str, Expr]
"""The language is what `root` matches as a whole."""

EMPTY = Seq(())
NOTHING = Chars(())


ANY = Chars(characters.ALL)


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    return Chars(characters.intersection(characters.union(ranges), characters.ALL))


def others(one: Chars) -> Chars:
    """Every character but these."""
    return Chars(characters.complement(one.ranges))


def minus(one: Chars, other: Chars) -> Chars:
    return Chars(characters.intersection(one.ranges, characters.complement(other.ranges)))


def seq(parts: Iterable[Expr]) -> Expr:
    """Flat, and texts beside each other as one."""
    found: list[Expr] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if isinstance(one, Text) and found and isinstance(found[-1], Text):
                found[-1] = Text(found[-1].text + one.text)
            elif one != Text(""):
                found.append(one)
    return found[0] if len(found) == 1 else Seq(tuple(found))


def alt(options: Iterable[Expr]) -> Expr:
    found: dict[Expr, None] = {}
    for option in options:
        found.update(dict.fromkeys(option.options if isinstance(option, Alt) else (option,)))
    found.pop(NOTHING, None)
    return Alt(tuple(found)) if len(found) > 1 else next(iter(found), NOTHING)


def pruned(rules: Rules) -> Rules:
    """Without what no text can come of, and without rules that `root` does not lead to.

    What is left has no dead ends. Raises GrammarError for names that no rule has, and where nothing is left.
    """
    if "root" not in rules:
        raise GrammarError("there is no rule named root")
    for name, expr in rules.items():
        if unknown := sorted(refs(expr) - rules.keys()):
            raise GrammarError(f"rule {name} refers to {unknown[0]}, which no rule is named")
    finite = _finite(rules)
    if "root" not in finite:
        raise GrammarError("no text satisfies it")
    kept = {name: _kept(expr, finite) for name, expr in rules.items() if name in finite}
    reached = _reached(kept)
    return {name: expr for name, expr in kept.items() if name in reached}


def matches(expr: Expr, text: str) -> bool:
    """Whether the whole of `text` is in `expr`, which refers to no rule."""
    return len(text) in _ends(expr, text, {0})


def _ends(expr: Expr, text: str, starts: set[int]) -> set[int]:
    match expr:
        case Text(part):
            return {at + len(part) for at in starts if text.startswith(part, at)}
        case Chars(ranges):
            inside = {at for at in starts if at < len(text) and characters.contains(ranges, ord(text[at]))}
            return {at + 1 for at in inside}
        case Seq(parts):
            for part in parts:
                starts = _ends(part, text, starts)
            return starts
        case Alt(options):
            return set().union(*(_ends(option, text, starts) for option in options))
        case Repeat(part, least, most):
            return _repeated_ends(part, text, starts, least, most)
    raise TypeError(f"{expr} is no regular expression by itself")


def _repeated_ends(part: Expr, text: str, starts: set[int], least: int, most: int | None) -> set[int]:
    """More repetitions than the text has characters change nothing."""
    found = set(starts) if not least else set[int]()
    for count in range(1, min(most if most is not None else least + len(text), least + len(text)) + 1):
        starts = _ends(part, text, starts)
        if not starts:
            break
        found |= starts if count >= least else set()
    return found


def refs(expr: Expr) -> set[str]:
    found, todo = set[str](), [expr]
    while todo:
        one = todo.pop()
        if isinstance(one, Ref):
            found.add(one.name)
        todo += _parts(one)
    return found


def is_regular(rules: Rules) -> bool:
    """No rule comes back to itself."""
    above: dict[str, set[str]] = {name: refs(expr) for name, expr in rules.items()}
    while above:
        ends = [name for name, names in above.items() if not names & above.keys()]
        if not ends:
            return False
        for name in ends:
            del above[name]
    return True


def _parts(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Seq):
        return expr.parts
    if isinstance(expr, Alt):
        return expr.options
    if isinstance(expr, Followed):
        return expr.part, expr.by
    return (expr.part,) if isinstance(expr, Repeat) else ()


def _finite(rules: Rules) -> set[str]:
    """Rules that some text satisfies."""
    found: set[str] = set()
    while more := {name for name, expr in rules.items() if name not in found and _has_text(expr, found)}:
        found |= more
    return found


def _has_text(expr: Expr, finite: set[str]) -> bool:
    if isinstance(expr, Ref):
        return expr.name in finite
    if isinstance(expr, Chars):
        return bool(expr.ranges)
    if isinstance(expr, Alt):
        return any(_has_text(option, finite) for option in expr.options)
    if isinstance(expr, Repeat):
        return not expr.least or _has_text(expr.part, finite)
    return all(_has_text(part, finite) for part in _parts(expr))


def _kept(expr: Expr, finite: set[str]) -> Expr:
    """`expr`, which has a text, without the options that have none."""
    if isinstance(expr, Alt):
        return alt(_kept(option, finite) for option in expr.options if _has_text(option, finite))
    if isinstance(expr, Seq):
        return seq(_kept(part, finite) for part in expr.parts)
    if isinstance(expr, Repeat):
        if not _has_text(expr.part, finite) or expr.most == 0:
            return EMPTY
        return Repeat(_kept(expr.part, finite), expr.least, expr.most)
    return Followed(_kept(expr.part, finite), expr.by) if isinstance(expr, Followed) else expr


def _reached(rules: Rules) -> set[str]:
    found, todo = set[str](), ["root"]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += refs(rules[name])
    return found
