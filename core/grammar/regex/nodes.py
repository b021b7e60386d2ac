"""Regular expressions as trees."""

from __future__ import annotations

from dataclasses import dataclass

from core.grammar.regex.characters import Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """The start or the end of the text."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Ahead:
    body: Node
    negative: bool


Node = Chars | Sequence | Choice | Loop | Edge | Ahead


def inside(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.body,) if isinstance(node, Loop | Ahead) else ()


def has(node: Node, *kinds: type) -> bool:
    return isinstance(node, kinds) or any(has(part, *kinds) for part in inside(node))


def times(low: int, high: int | None) -> str:
    """A count as all notations write it: `*`, `{2,3}`."""
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"
