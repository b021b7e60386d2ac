"""The texts that a pattern of ECMA 262 is found in, as a language: anchors and looks ahead become intersections."""

from __future__ import annotations

from core.grammar.regex import ECMA, parse
from core.grammar.regex.nodes import Ahead, Chars, Choice, Edge, Loop, Node, Sequence, has, inside
from core.grammar.schema.languages import Language, Languages, Op
from core.stages.grammar import GrammarError


def language(languages: Languages, pattern: str) -> Language:
    """Raises GrammarError."""
    return Translation(languages).found_in(parse(pattern, ECMA))


class Translation:
    def __init__(self, languages: Languages):
        self._languages = languages

    def found_in(self, node: Node) -> Language:
        """The match may begin anywhere, and what follows it is free."""
        made = self._languages
        at_start = self._then(node, made.any, is_start=True)
        if not _has_start(node):
            return made.cat(made.any, at_start)
        later = self._then(node, made.any, is_start=False)
        return made.alt(at_start, made.cat(made.loop(made.any_char, 1), later))

    def _then(self, node: Node, rest: Language, is_start: bool) -> Language:
        """What may stand from here to the end of the text: a match of `node`, then `rest`."""
        made = self._languages
        if not has(node, Edge, Ahead):
            return made.cat(self._alone(node), rest)
        if isinstance(node, Edge):
            if node.is_start:
                return rest if is_start else made.none
            return made.empty if rest.nullable else made.none
        if isinstance(node, Ahead):
            seen = self._then(node.body, made.any, is_start)
            return made.both(rest, made.complement(seen) if node.negative else seen)
        if isinstance(node, Choice):
            return made.alt(*(self._then(option, rest, is_start) for option in node.options))
        if isinstance(node, Sequence):
            return self._sequence(node.parts, rest, is_start)
        return self._loop(node, rest, is_start)

    def _sequence(self, parts: tuple[Node, ...], rest: Language, is_start: bool) -> Language:
        if not parts:
            return rest
        first, others = parts[0], parts[1:]
        self._languages.budget.spend(len(others) // 8)
        if not is_start or not any(map(_has_start, others)):
            for part in reversed(others):
                rest = self._then(part, rest, is_start=False)
            return self._then(first, rest, is_start)
        if isinstance(first, Edge | Ahead):
            return self._then(first, self._sequence(others, rest, is_start), is_start)
        if has(first, Edge, Ahead):
            raise GrammarError("an anchor after a group that has one is not supported")
        made, alone = self._languages, self._alone(first)
        if not alone.nullable:
            return made.cat(alone, self._sequence(others, rest, is_start=False))
        some = made.both(alone, made.complement(made.empty))
        later = made.cat(some, self._sequence(others, rest, is_start=False))
        return made.alt(later, self._sequence(others, rest, is_start=True))

    def _loop(self, node: Node, rest: Language, is_start: bool) -> Language:
        if isinstance(node, Loop) and (node.low, node.high) == (0, 1):
            return self._languages.alt(self._then(node.body, rest, is_start), rest)
        raise GrammarError("an anchor or a look ahead inside a repetition is not supported")

    def _alone(self, node: Node) -> Language:
        """Of a node without assertions."""
        made = self._languages
        if isinstance(node, Chars):
            return made.chars(node.ranges)
        if isinstance(node, Choice):
            return made.alt(*map(self._alone, node.options))
        if isinstance(node, Sequence):
            return made.cat(*map(self._alone, node.parts))
        assert isinstance(node, Loop)
        body = self._alone(node.body)
        if body.op is Op.LOOP and node.high is not None and body.high is not None and body.high * node.high > 4096:
            raise GrammarError("a count of counts that is so large is not supported")
        return made.loop(body, node.low, node.high)


def _has_start(node: Node) -> bool:
    return (isinstance(node, Edge) and node.is_start) or any(map(_has_start, inside(node)))
