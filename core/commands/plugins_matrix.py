"""`plugins matrix`: which components work together, by the same check that refuses a config. Imports no torch.

A pair is checked with the default config for the other groups; where one of the two requires a word that a default does not
provide, with the first component that does. `tests/e2e/test_matrix.py` runs every pair of built-ins that
is said to work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb

from core.assembly import describe
from core.capabilities import config_facts, installed, party_of
from core.components import CHAINS
from core.config.clashes import Fact, Party, clashes
from core.config.compose import compose
from core.errors import ConfigError, near_matches
from core.plugins import Plugins, load_plugins
from core.settings import Settings

FLAGS = ("--all", "--json")
USAGE = "usage: plugins matrix [--all] [--json] [GROUP=NAME …]"
MAX_COMPONENTS = 250  # of a whole table: each component meets each other
MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """Two components, and why they do not work together; no reason: they do."""

    first: Party
    second: Party
    reason: str = ""

    @property
    def works(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands around a pair: the default config's components and facts, and what could be selected instead."""

    parties: tuple[Party, ...]
    facts: Mapping[str, Fact]
    alternatives: tuple[Party, ...]

    @classmethod
    def default(cls, plugins: Plugins) -> Surroundings:
        settings = Settings.from_config(compose([], plugins).values)
        description = describe(settings, plugins)
        parties = tuple(party_of(part.provided) for part in description.parts)
        return cls(parties, config_facts(settings, description), tuple(installed(plugins)))

    def cell(self, first: Party, second: Party) -> Cell:
        groups = {party.group for party in (first, second)} - set(CHAINS)
        others = [party for party in self.parties if party.group not in groups and party not in (first, second)]
        wanted = (*first.requires, *second.requires)
        found = clashes(
            [*(self._suited(party, wanted) for party in others), first, second], self.facts, self.alternatives
        )
        return Cell(first, second, "; ".join(clash.reason for clash in found))

    def _suited(self, party: Party, wanted: Sequence[str]) -> Party:
        """`party`, or the first of its group that provides what is wanted of that and this one lacks."""
        words = {word for group, _, word in (one.partition(".") for one in wanted) if group == party.group}
        if party.group in CHAINS or words <= party.provides:
            return party
        able = (other for other in self.alternatives if other.group == party.group and words <= other.provides)
        return next(able, party)


def run(arguments: Sequence[str]) -> int:
    words = [argument for argument in arguments if argument not in FLAGS]
    if unknown := [word for word in words if word.startswith("-") or "=" not in word]:
        raise ConfigError(f"unknown argument {unknown[0]!r}; {USAGE}")
    plugins = load_plugins() if "--all" in arguments else load_plugins(["all"])
    parties = installed(plugins)
    named = _named(words, parties)
    found = cells(plugins, named)
    if "--json" in arguments:
        print(json.dumps(as_json(parties, found), indent=2, ensure_ascii=False))
    else:
        rows = _lines(found) if named else table(parties, found)
        print("\n".join([*rows, *legend(found), *_left_out("--all" in arguments)]))
    return 0


def _named(words: Sequence[str], parties: Sequence[Party]) -> list[Party]:
    """Raises ConfigError for a word that is no component, and where nobody could read the answer."""
    known = {name_of(party): party for party in parties}
    if unknown := [word for word in words if word not in known]:
        raise ConfigError(f"no component is called {unknown[0]!r}{near_matches(unknown[0], known)}; {USAGE}")
    if not words and len(parties) > MAX_COMPONENTS:
        raise ConfigError(
            f"{len(parties)} components make {comb(len(parties), 2)} pairs, and a whole table has {MAX_COMPONENTS} components "
            f"at most; name those you ask about, as in plugins matrix --all {name_of(parties[-1])}"
        )
    if len(words) > MAX_NAMED:
        raise ConfigError(f"name {MAX_NAMED} components at most; {USAGE}")
    return [known[word] for word in dict.fromkeys(words)]


def cells(plugins: Plugins, named: Sequence[Party] = ()) -> list[Cell]:
    """Pairs that a config can select: of different groups, or two members of a chain. All, or those of `named`."""
    around = Surroundings.default(plugins)
    others = [party for party in around.alternatives if party not in named]
    pairs = [*combinations(named, 2), *product(named, others)] if named else combinations(others, 2)
    return [around.cell(a, b) for a, b in pairs if a.group != b.group or a.group in CHAINS]


def table(parties: Sequence[Party], found: Sequence[Cell]) -> list[str]:
    """A triangle: row and column give the pair."""
    marks = {(name_of(cell.second), name_of(cell.first)): "+" if cell.works else "-" for cell in found}
    names = [name_of(party) for party in parties]
    digits = max(2, len(str(len(names))))
    labels = [f"{number:>{digits}} {name}" for number, name in enumerate(names, start=1)]
    width = max(map(len, labels))
    rows = [
        f"{label:<{width}}"
        + "".join(f"{marks.get((names[index], other), '.'):>{digits + 1}}" for other in names[:index])
        for index, label in enumerate(labels)
    ]
    return [*rows, " " * width + "".join(f"{number:>{digits + 1}}" for number in range(1, len(parties)))]


def _lines(found: Sequence[Cell]) -> list[str]:
    return [f"{'+' if cell.works else '-'} {name_of(cell.first)} with {name_of(cell.second)}" for cell in found]


def legend(found: Sequence[Cell]) -> list[str]:
    refused = [cell for cell in found if not cell.works]
    reasons = [f"- {name_of(cell.first)} with {name_of(cell.second)}: {cell.reason}" for cell in refused]
    counts = f"+ {len(found) - len(refused)} pairs work, - {len(refused)} do not, . one of the two is selected"
    return ["", counts, *reasons]


def _left_out(shows_all: bool) -> list[str]:
    return [] if shows_all else ["", "built-in components only; --all adds those of installed plugins"]


def as_json(parties: Sequence[Party], found: Sequence[Cell]) -> dict[str, object]:
    pairs = [
        {"first": name_of(cell.first), "second": name_of(cell.second), "works": cell.works, "reason": cell.reason}
        for cell in found
    ]
    return {"components": [name_of(party) for party in parties], "pairs": pairs}


def name_of(party: Party) -> str:
    return f"{party.group}={party.name}"
