"""What operations on shapes need of the rewriting of one schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.grammar.schema.formulas import Formula, Formulas
from core.grammar.schema.languages import Languages
from core.grammar.schema.limits import Budget, Limits


@dataclass(frozen=True, slots=True)
class Tools:
    formulas: Formulas
    languages: Languages
    budget: Budget
    is_empty: Callable[[Formula], bool]  # False also where it would take too long to find out

    @property
    def limits(self) -> Limits:
        return self.budget.limits
