"""What rewriting one schema may cost, and how a refusal reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from core.stages.grammar import GrammarError


@dataclass(frozen=True, slots=True)
class Limits:
    """Case splits multiply: past one of these a schema is refused."""

    max_steps: int = 80_000  # shapes that are intersected, and derivatives of patterns
    max_cases: int = 512  # of one schema and type
    max_formulas: int = 4096  # schemas of the result, before equal ones are merged
    max_output: int = 20_000  # objects and lists of the result
    max_states: int = 2000  # of an automaton that is searched
    max_pattern: int = 4000  # characters of a pattern that is made here
    max_subsets: int = 400  # properties present or absent, items in or out
    max_look_ahead: int = 24  # schemas below each other that are looked at to show that two do not overlap


class Budget:
    """Counts the work that a schema causes, whatever it is, in steps of some ten microseconds."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._left = limits.max_steps

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise GrammarError("a schema with so many cases is not supported")


def refuse(keyword: str, where: str, why: str = "") -> NoReturn:
    """`where`: a JSON pointer, as `#/properties/a`."""
    place = f"{keyword} at {where or '#'}" if keyword else (where or "#")
    raise GrammarError(f"{place} is not supported{f': {why}' if why else ''}")


def malformed(keyword: str, where: str, must: str) -> NoReturn:
    raise GrammarError(f"{keyword} at {where or '#'} must be {must}")
