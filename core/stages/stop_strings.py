"""Stop strings over streamed text in linear time (Aho and Corasick 1975), independent of how the text is cut into pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` is deliverable now; `stop` is the string that matched, after which nothing more is."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string. `fail` is the longest proper suffix of it that is a prefix as well."""

    depth: int
    children: dict[str, int] = field(default_factory=dict)
    fail: int = 0
    stop: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Invariant: text emitted + text withheld = all text pushed, up to the match.

    The first match to be completed wins; of several that end at the same character, the longest, so that nothing of a
    matched stop string is delivered. Withheld is only what may still grow into a match: at most the longest stop
    string less one character. Empty stop strings never match.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: deliver the matched stop string too (include_stop_str_in_output)."""
        self._include = include
        self._nodes = _automaton([stop for stop in stops if stop])
        self._state = 0
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopMatch:
        """Add text. While not `armed` (before min_tokens) a completed match is ordinary text.

        After a match, the matcher is spent: push no more.
        """
        nodes, state = self._nodes, self._state
        for index, char in enumerate(text):
            while state and char not in nodes[state].children:
                state = nodes[state].fail
            state = nodes[state].children.get(char, 0)
            stop = nodes[state].stop
            if stop is not None and armed:
                return self._matched(self._held + text[: index + 1], stop)
            while (
                state and not nodes[state].children
            ):  # only after a match that was ignored: nothing longer starts here
                state = nodes[state].fail
        self._state = state
        return StopMatch(self._release(self._held + text, nodes[state].depth))

    def flush(self) -> str:
        """The text withheld, when it ends without a match."""
        return self._release(self._held, 0)

    def _release(self, text: str, hold: int) -> str:
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def _matched(self, text: str, stop: str) -> StopMatch:
        self._held, self._state = "", 0
        return StopMatch(text if self._include else text[: len(text) - len(stop)], stop)


def _automaton(stops: Sequence[str]) -> list[_Node]:
    nodes = [_Node(depth=0)]
    for stop in stops:
        at = 0
        for char in stop:
            if char not in nodes[at].children:
                nodes[at].children[char] = len(nodes)
                nodes.append(_Node(depth=nodes[at].depth + 1))
            at = nodes[at].children[char]
        nodes[at].stop = stop
    _link(nodes)
    return nodes


def _link(nodes: list[_Node]) -> None:
    """Breadth first, so that the links of shorter prefixes exist already."""
    queue = deque(nodes[0].children.values())
    while queue:
        node = nodes[queue.popleft()]
        for char, child in node.children.items():
            nodes[child].fail = _fallback(nodes, node.fail, char) if node.depth else 0
            nodes[child].stop = nodes[child].stop or nodes[nodes[child].fail].stop
            queue.append(child)


def _fallback(nodes: list[_Node], at: int, char: str) -> int:
    while at and char not in nodes[at].children:
        at = nodes[at].fail
    return nodes[at].children.get(char, 0)
