"""Pairwise covering sets: few compositions in which each pair that works occurs at least once.

The greedy construction of all-pairs testing: Cohen, Dalal, Fredman and Patton, "The AETG System", IEEE TSE 23(7), 1997.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

Item = tuple[str, str]  # (group, name)
Pair = frozenset[Item]


def pairs_of(composition: Iterable[Item]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(composition, 2)}


def covering(items: Sequence[Item], chains: Collection[str], wanted: Collection[Pair]) -> list[tuple[Item, ...]]:
    """Compositions of `items` that hold every pair of `wanted`, and no pair that is not wanted.

    Each has exactly one item of every group, and any number of the groups in `chains`. The order of items is kept.
    Raises ValueError for a pair that no composition can hold.
    """
    todo, made = set(wanted), []
    ordered = sorted(wanted, key=lambda pair: sorted(items.index(item) for item in pair))
    for pair in ordered:
        if pair in todo:
            made.append(_around(pair, items, chains, wanted, todo))
            todo -= pairs_of(made[-1])
    return made


def _around(
    pair: Pair, items: Sequence[Item], chains: Collection[str], wanted: Collection[Pair], todo: Collection[Pair]
) -> tuple[Item, ...]:
    """One composition with `pair`, grown by the item that covers most of what is still to do."""
    chosen = set(pair)
    while True:
        free = [item for item in items if item not in chosen and _fits(item, chosen, chains, wanted)]
        gains = {item: sum(frozenset((item, other)) in todo for other in chosen) for item in free}
        useful = [item for item in free if gains[item] or item[0] not in chains]
        if not useful:
            break
        chosen.add(max(useful, key=lambda item: gains[item]))
    missing = {group for group, _ in items} - {group for group, _ in chosen} - set(chains)
    if missing:
        raise ValueError(f"no {sorted(missing)} goes with {sorted(chosen)}")
    return tuple(item for item in items if item in chosen)


def _fits(item: Item, chosen: Collection[Item], chains: Collection[str], wanted: Collection[Pair]) -> bool:
    taken = {group for group, _ in chosen} - set(chains)
    return item[0] not in taken and all(frozenset((item, other)) in wanted for other in chosen)
