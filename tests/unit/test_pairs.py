"""Pairwise covering sets: every pair that works is in a composition, none that does not is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.testing.harness.pairs import Item, Pair, covering, pairs_of

CHAIN = "chain"
GROUPS = ("one", "two", "three")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Item], set[Pair]]:
    """Groups of one to four names and a chain; the first name of each group goes with everything."""
    sizes = {group: draw(st.integers(1, 4)) for group in GROUPS}
    items = [(group, str(index)) for group, size in sizes.items() for index in range(size)]
    items += [(CHAIN, str(index)) for index in range(draw(st.integers(0, 3)))]
    possible = [
        frozenset(pair) for pair in combinations(items, 2) if len({g for g, _ in pair}) == 2 or pair[0][0] == CHAIN
    ]
    optional = [pair for pair in possible if not any(name == "0" and group != CHAIN for group, name in pair)]
    refused = draw(st.sets(st.sampled_from(optional))) if optional else set()
    return items, set(possible) - refused


@given(worlds())
def test_the_compositions_hold_exactly_the_pairs_that_work(world: tuple[list[Item], set[Pair]]) -> None:
    items, wanted = world
    made = covering(items, [CHAIN], wanted)
    assert set().union(*map(pairs_of, made)) == wanted
    for composition in made:
        groups = [group for group, _ in composition if group != CHAIN]
        assert groups == list(GROUPS)  # one of each, in order
        assert list(composition) == sorted(composition, key=items.index)


def test_few_compositions_hold_many_pairs() -> None:
    items = [(group, str(index)) for group in GROUPS for index in range(4)] + [
        (CHAIN, str(index)) for index in range(6)
    ]
    wanted = {
        frozenset(pair) for pair in combinations(items, 2) if len({g for g, _ in pair}) == 2 or pair[0][0] == CHAIN
    }
    made = covering(items, [CHAIN], wanted)
    assert 16 <= len(made) <= 24  # 4 * 4 pairs of two groups cannot be in fewer; all combinations are 64 and more


def test_a_pair_that_no_composition_can_hold_is_named() -> None:
    items = [("one", "a"), ("two", "b"), ("three", "c")]
    wanted = {frozenset(items[:2])}
    with pytest.raises(ValueError, match=r"no \['three'\] goes with \[\('one', 'a'\), \('two', 'b'\)\]"):
        covering(items, (), wanted)
