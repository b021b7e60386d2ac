"""What operations on shapes need of the rewriting of one schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from core.grammar.schema.formulas import Formula, Formulas
from core.grammar.schema.languages import Languages
from core.grammar.schema.limits import Budget, Limits, refuse

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Tools:
    formulas: Formulas
    languages: Languages
    budget: Budget
    is_empty: Callable[[Formula], bool]  # False also where it would take too long to find out

    @property
    def limits(self) -> Limits:
        return self.budget.limits

    def bounded(self, cases: Iterable[Case], what: str) -> Iterator[Case]:
        """`cases`, made one by one: past `max_subsets` of them, none more is. Raises GrammarError that names `what`."""
        for count, case in enumerate(cases):
            self.budget.spend()
            if count >= self.limits.max_subsets:
                refuse("", what, "too many cases")
            yield case
