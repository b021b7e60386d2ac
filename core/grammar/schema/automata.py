"""Languages as automata: is there any text, and a regular expression for what has intersections and complements in it."""

from __future__ import annotations

from itertools import pairwise

from core.grammar.regex import characters
from core.grammar.regex.characters import Ranges
from core.grammar.schema.languages import Language, Languages, Op
from core.grammar.schema.limits import Limits

MAX_STATES_WRITTEN = 48  # of an automaton that becomes a regular expression: it grows fast with them


def alphabet(languages: Languages, term: Language) -> list[Ranges]:
    """Sets of characters that all of `term`'s derivatives treat alike; together they are all characters."""
    sets, seen, left = set[Ranges](), set[int](), [term]
    while left:
        part = left.pop()
        if part.uid not in seen:
            seen.add(part.uid)
            left += part.parts
            if part.op is Op.CHARS:
                sets.add(part.chars)
    ordered = sorted(sets)
    cuts = {0, 0xD800, 0xE000}
    for ranges in ordered:
        for first, last in ranges:
            cuts |= {first, last + 1}
    ends = [*sorted(cuts), characters.LAST + 1]
    languages.budget.spend(len(seen) // 8 + len(ends) * len(ordered) // 16)
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for first, end in pairwise(ends):
        if first < end and not 0xD800 <= first < 0xE000:
            found.setdefault(tuple(characters.contains(r, first) for r in ordered), []).append((first, end - 1))
    return [characters.union(spans) for spans in found.values()]


def is_empty(languages: Languages, term: Language, limits: Limits) -> bool:
    """False also where it would take too long to find out."""
    if term.nullable or term.plain:
        return term is languages.none
    points = [ranges[0][0] for ranges in alphabet(languages, term)]
    seen, left = {term.uid}, [term]
    while left:
        state = left.pop()
        if state.nullable or state is languages.any or len(seen) > limits.max_states:
            return False
        for point in points:
            following = languages.derivative(state, point)
            if following is not languages.none and following.uid not in seen:
                seen.add(following.uid)
                left.append(following)
    return True


def has_length(languages: Languages, term: Language, low: int, high: int | None, limits: Limits) -> bool:
    """Whether a text of `low` to `high` characters is in it; True also where it would take too long to find out."""
    points = [ranges[0][0] for ranges in alphabet(languages, term)]
    states, length, num_seen = {term.uid: term}, 0, 0
    lengths: dict[frozenset[int], int] = {}  # at which these were the states that texts so long lead to
    while states and (high is None or length <= high):
        num_seen += len(states)
        if num_seen > limits.max_states or (length >= low and any(state.nullable for state in states.values())):
            return True
        earlier = lengths.setdefault(frozenset(states), length)
        if earlier < length:
            if earlier >= low:
                return False
            length += max(low - length, 0) // (length - earlier) * (length - earlier)
            lengths.clear()
        following = (languages.derivative(state, point) for state in states.values() for point in points)
        states = {state.uid: state for state in following if state is not languages.none}
        length += 1
    return False


def plain_form(languages: Languages, term: Language, max_states: int = MAX_STATES_WRITTEN) -> Language | None:
    """The same language without AND and NOT; None where it is too large."""
    if term.plain:
        return term
    table = _table(languages, term, max_states * 8)
    minimal = None if table is None else _minimal(languages, *table, max_states)
    return None if minimal is None else _eliminated(languages, *minimal)


Edges = list[dict[int, Ranges]]
"""By state: the states that follow, with the characters that lead there."""


def _table(languages: Languages, term: Language, max_states: int) -> tuple[Edges, list[bool]] | None:
    """The automaton of all derivatives; state 0 is `term`."""
    atoms = alphabet(languages, term)
    numbers, states, edges = {term.uid: 0}, [term], Edges()
    for state in states:  # grows while it is walked
        row: dict[int, list[tuple[int, int]]] = {}
        for ranges in atoms:
            following = languages.derivative(state, ranges[0][0])
            if following.uid not in numbers:
                numbers[following.uid] = len(states)
                states.append(following)
                if len(states) > max_states:
                    return None
            row.setdefault(numbers[following.uid], []).extend(ranges)
        edges.append({target: characters.union(spans) for target, spans in row.items()})
    return edges, [state.nullable for state in states]


def _minimal(languages: Languages, edges: Edges, ends: list[bool], max_states: int) -> tuple[Edges, list[bool]] | None:
    """States that no text tells apart become one (Moore's partition refinement); None where more are left than `max_states`."""
    block, num_ranges = [int(end) for end in ends], sum(len(ranges) for row in edges for ranges in row.values())
    while True:
        languages.budget.spend((len(edges) + num_ranges) // 8)
        keys: dict[tuple[object, ...], int] = {}
        finer = []
        for state, row in enumerate(edges):
            by_block: dict[int, list[tuple[int, int]]] = {}
            for target, ranges in row.items():
                by_block.setdefault(block[target], []).extend(ranges)
            signature = (block[state], *sorted((b, characters.union(spans)) for b, spans in by_block.items()))
            finer.append(keys.setdefault(signature, len(keys)))
        if len(keys) > max_states:
            return None
        if len(keys) == len(set(block)):
            return _merged(edges, ends, finer)
        block = finer


def _merged(edges: Edges, ends: list[bool], block: list[int]) -> tuple[Edges, list[bool]]:
    """Numbered so that state 0 stays the first."""
    order = {name: number for number, name in enumerate(dict.fromkeys(block))}
    merged, accepting = [dict[int, Ranges]() for _ in order], [False] * len(order)
    for state, row in enumerate(edges):
        new = order[block[state]]
        accepting[new] = ends[state]
        spans: dict[int, list[tuple[int, int]]] = {}
        for target, ranges in row.items():
            spans.setdefault(order[block[target]], []).extend(ranges)
        merged[new] = {target: characters.union(found) for target, found in spans.items()}
    return merged, accepting


def _eliminated(languages: Languages, edges: Edges, ends: list[bool]) -> Language:
    """Kleene's construction: states are taken out one by one, and what went through them is written on the edges."""
    start, end = -1, -2
    links: dict[tuple[int, int], Language] = {(start, 0): languages.empty}
    for state, row in enumerate(edges):
        links |= {(state, target): languages.chars(ranges) for target, ranges in row.items()}
        if ends[state]:
            links[state, end] = languages.empty
    for state in sorted(range(len(edges)), key=lambda s: (s == 0, len(edges[s]))):
        own = languages.loop(links.pop((state, state), languages.none))
        before = [(a, term) for (a, b), term in links.items() if b == state]
        after = [(b, term) for (a, b), term in links.items() if a == state]
        links = {pair: term for pair, term in links.items() if state not in pair}
        for a, first in before:
            for b, last in after:
                through = languages.cat(first, own, last)
                links[a, b] = languages.alt(links.get((a, b), languages.none), through)
    return links.get((start, end), languages.none)
