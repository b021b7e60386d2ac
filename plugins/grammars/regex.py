"""Regular expressions, as far as ECMAScript's, Python's and Rust's agree on them, to rules.

`\\d`, `\\w` and `\\s` are ASCII's; `\\D`, `\\W`, `\\S` and classes hold the characters that are in them in all three, with
ASCII's sets and with Unicode's; a dot is any character but ECMAScript's line ends; characters are Unicode's code points. What
is no regular language (back references), looks around, or is a flag, is refused by name, and so is what one of the three reads
as something else.
"""

from __future__ import annotations

from core.grammar.regex import COMMON, parse
from core.grammar.regex.nodes import Chars, Choice, Edge, Loop, Node, Sequence, has
from core.stages.grammar import GrammarError
from plugins.grammars import rules
from plugins.grammars.rules import ANY, EMPTY, Expr, Repeat, Text, alt, seq


def parse_regex(pattern: str, *, anywhere: bool = False) -> Expr:
    """What the whole of a text must match; with `anywhere` what must match somewhere in it, as a JSON schema's `pattern`.

    Raises GrammarError that says where.
    """
    try:
        return alt(_Edges(anywhere).resolved((parse(pattern, COMMON),)))
    except GrammarError as error:
        raise GrammarError(f"regular expression: {error}") from None


class _Edges:
    """Where a text begins and ends: `^` and `$` count there alone, and elsewhere they are refused."""

    def __init__(self, anywhere: bool):
        self._more = Repeat(ANY, 0, None) if anywhere else EMPTY

    def resolved(self, nodes: tuple[Node, ...]) -> list[Expr]:
        """One alternative of the whole pattern, as alternatives without edges."""
        for at in (0, -1):
            node = nodes[at] if nodes else None
            if isinstance(node, Choice | Sequence) and (len(nodes) == 1 or has(node, Edge)):
                ways = map(_in_a_row, node.options if isinstance(node, Choice) else (node,))
                left = ((*way, *nodes[1:]) if at == 0 else (*nodes[:-1], *way) for way in ways)
                return [expr for one in left for expr in self.resolved(one)]
        first, last = 0, len(nodes)
        while first < last and nodes[first] == Edge(is_start=True):
            first += 1
        while first < last and nodes[last - 1] == Edge(is_start=False):
            last -= 1
        parts = map(_without_edges, nodes[first:last])
        return [seq([EMPTY if first else self._more, *parts, EMPTY if last < len(nodes) else self._more])]


def _in_a_row(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, Sequence) else (node,)


def _without_edges(node: Node) -> Expr:
    if isinstance(node, Chars):
        (first, last), *more = node.ranges or ((0, -1),)
        return rules.Chars(node.ranges) if more or first != last else Text(chr(first))
    if isinstance(node, Sequence):
        return seq(map(_without_edges, node.parts))
    if isinstance(node, Choice):
        return alt(map(_without_edges, node.options))
    if isinstance(node, Loop):
        return Repeat(_without_edges(node.body), node.low, node.high)
    raise GrammarError("^ and $ are supported at its two ends alone")
