"""The rows of the policy table: what each policy did on each traffic, seed by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from statistics import fmean

import numpy as np

from core.simulation.cells import Figures
from core.simulation.intervals import Interval, relative_change
from core.simulation.records import Floats
from core.simulation.scenarios import Contender, Scenario


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one block at one load: what each seed gave, in the order of the seeds."""

    scenario: Scenario
    load: float
    contender: Contender
    runs: tuple[Figures, ...]
    baseline: tuple[Figures, ...]

    @property
    def problem(self) -> str:
        return next((run.problem for run in self.runs if run.problem), "")

    def of(self, name: str) -> list[float]:
        return [run.values.get(name, float("nan")) for run in self.runs]

    def mean(self, name: str) -> float:
        found = [value for value in self.of(name) if not isnan(value)]
        return fmean(found) if found else float("nan")

    def curve(self, name: str) -> Floats:
        """Quantiles of all seeds together."""
        return np.sort(np.concatenate([np.asarray(run.curves.get(name, []), np.float64) for run in self.runs]))

    def change(self, name: str) -> Interval:
        """Against the baseline, in pairs."""
        pairs = zip(self.of(name), (run.values.get(name, float("nan")) for run in self.baseline), strict=True)
        known = [(one, other) for one, other in pairs if isfinite(one) and isfinite(other)]
        return relative_change([one for one, _ in known], [other for _, other in known])


@dataclass(frozen=True, slots=True)
class Table:
    rows: tuple[Row, ...]
    capacities: Mapping[str, float]  # requests per second, by scenario
    num_requests: int = 0  # of each run; 0: not known

    def row(self, scenario: str, load: float, contender: str) -> Row:
        """Raises KeyError where there is none."""
        for row in self.rows:
            if (row.scenario.name, row.load, row.contender.name) == (scenario, load, contender):
                return row
        raise KeyError(f"{contender} on {scenario} at {load}")

    def blocks(self) -> Iterator[tuple[Scenario, float, list[Row]]]:
        keys = dict.fromkeys((row.scenario.name, row.load) for row in self.rows)
        for name, load in keys:
            rows = [row for row in self.rows if (row.scenario.name, row.load) == (name, load)]
            yield rows[0].scenario, load, rows
