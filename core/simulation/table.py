"""`simulate table`: every policy on the same traffic, side by side.

All policies of a block see the same arrivals (common random numbers), so differences are those of the policies. Each cell is
the mean over several seeds; the change against `fcfs` is that of pairs with the same seed, with a 95 % interval.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from core.errors import ConfigError
from core.plugins import load_plugins
from core.simulation.cells import Job, run_jobs
from core.simulation.course import Course
from core.simulation.files import write_text
from core.simulation.scenarios import BASELINE, Contender, Scenario, contenders, scenarios
from core.simulation.table_rows import Row, Table
from core.simulation.table_text import as_records, plot_table

SIZES = {"tiny": (2, 60), "small": (3, 200), "full": (5, 500)}  # seeds, requests of each run


class TableSettings(BaseModel):
    """`simulate table size=small policies=fcfs,srtf json=table.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: Literal["tiny", "small", "full"] = Field(
        default="full", description="seeds and requests of a cell: 2 x 60 (tiny), 3 x 200 (small), 5 x 500 (full)"
    )
    seeds: int | None = Field(
        default=None, ge=1, le=100, description="runs of each cell; null: as size says; with 1 or 2 no change is sure"
    )
    num_requests: int | None = Field(default=None, ge=10, description="of each run; null: as size says")
    workers: int = Field(default=2, ge=1, le=64, description="processes; 1: this one alone")
    cost: str = Field(default="gpu", description="what steps cost: gpu, cpu, or a file that `simulate fit` wrote")
    slo_ttft: float = Field(default=1.0, gt=0, description="goodput counts requests with at most this TTFT, in seconds")
    slo_tpot: float = Field(default=0.1, gt=0, description="and at most this TPOT, in seconds")
    policies: str = Field(default="", description="rows, with commas between; empty: all")
    scenarios: str = Field(
        default="", description="blocks, with commas between and spaces as underscores (short_under_long); empty: all"
    )
    json_file: str | None = Field(default=None, alias="json", description="all figures as JSON, to this file")
    csv_file: str | None = Field(default=None, alias="csv", description="one line per row and block, to this file")
    plot: str | None = Field(default=None, description="a folder for pictures of the blocks; needs matplotlib")

    @property
    def num_seeds(self) -> int:
        return self.seeds or SIZES[self.size][0]

    @property
    def run_length(self) -> int:
        return self.num_requests or SIZES[self.size][1]


def make_table(settings: TableSettings) -> Table:
    """Runs everything. Raises ConfigError for an unknown row or block, and for traffic that no machine can serve."""
    blocks = scenarios(_names(settings.scenarios))
    rows = contenders(load_plugins().names("scheduler"), _names(settings.policies))
    capacities = _capacities(blocks, settings)
    cells = [(s, load, c) for s in blocks for load in s.loads for c in rows if s.takes(c)]
    jobs = [
        _job(s, load * capacities[s.name], c, seed, settings)
        for s, load, c in cells
        for seed in range(settings.num_seeds)
    ]
    with Course("runs", len(jobs)) as course:
        found = iter(run_jobs(jobs, settings.workers, course.add))
    runs = {(s.name, load, c.name): tuple(next(found) for _ in range(settings.num_seeds)) for s, load, c in cells}
    return Table(
        tuple(Row(s, load, c, runs[s.name, load, c.name], runs[s.name, load, BASELINE]) for s, load, c in cells),
        capacities,
        settings.run_length,
    )


def _capacities(blocks: Sequence[Scenario], settings: TableSettings) -> dict[str, float]:
    jobs = [
        Job(traffic=dict(s.traffic), overrides=s.overrides, cost=settings.cost, asks_for="capacity") for s in blocks
    ]
    found = run_jobs(jobs, settings.workers)
    for scenario, one in zip(blocks, found, strict=True):
        if one.problem:
            raise ConfigError(f"{scenario.name}: {one.problem}", "scenarios")
    return {scenario.name: one.values["capacity"] for scenario, one in zip(blocks, found, strict=True)}


def _job(scenario: Scenario, rate: float, contender: Contender, seed: int, settings: TableSettings) -> Job:
    return Job(
        traffic={**scenario.traffic, "rate": rate, "seed": seed, "num_requests": settings.run_length},
        overrides=scenario.words(contender),
        cost=settings.cost,
        slo=(settings.slo_ttft, settings.slo_tpot),
        focus=scenario.focus,
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def write_files(table: Table, settings: TableSettings) -> None:
    """Raises ConfigError naming the key whose file cannot be written."""
    records = as_records(table)
    if settings.json_file:
        found = {"capacities": dict(table.capacities), "num_requests": table.num_requests, "rows": records}
        write_text("json", settings.json_file, json.dumps(found, indent=2))
    if settings.csv_file:
        write_text("csv", settings.csv_file, _as_csv(records))
    if settings.plot:
        plot_table(table, settings.plot)


def _as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Lines without the end of the last one."""
    lines = io.StringIO()
    writer = csv.DictWriter(
        lines, list(dict.fromkeys(name for record in records for name in record)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(records)
    return lines.getvalue().removesuffix("\n")
