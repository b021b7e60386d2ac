"""The policy table as text, as records for JSON and CSV, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.simulation.plots import plot_bars, plot_curves
from core.simulation.scenarios import BASELINE, Scenario
from core.simulation.table_rows import Row, Table


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    name: str  # of a figure
    form: str


COLUMNS = (
    Column("TTFT mean s", "mean_ttft_s", "{:.2f}"),
    Column("p99 s", "p99_ttft_s", "{:.2f}"),
    Column("TPOT ms", "mean_tpot_s", "{:.1f}"),
    Column("latency s", "mean_e2e_s", "{:.2f}"),
    Column("slowdown p99", "p99_slowdown", "{:.1f}"),
    Column("Jain", "jain", "{:.3f}"),
    Column("goodput/s", "goodput", "{:.2f}"),
    Column("preempted", "preemptions", "{:.2f}"),
    Column("KV waste", "kv_waste", "{:.2%}"),
)
FOCUS = (
    Column("their p99 TTFT s", "focus_p99_ttft_s", "{:.2f}"),
    Column("p99 latency s", "focus_p99_e2e_s", "{:.2f}"),
)
SERVED = (Column("served", "served_share", "{:.1%}"),)
CACHED = (Column("cached", "cached_share", "{:.1%}"),)
NAME = 18  # width of the rows' names
MILLI = ("mean_tpot_s",)  # shown in thousandths


def as_text(table: Table) -> str:
    lines = []
    for scenario, load, rows in table.blocks():
        rate = table.capacities[scenario.name]
        lines += [
            "",
            f"{scenario.name} at {load:g}x load ({scenario.about}; {load * rate:.2f} of {rate:.2f} requests/s)",
        ]
        columns = _columns(scenario)
        lines.append(f"{'':<{NAME}}" + "".join(f"{c.title:>{_width(c)}}" for c in columns) + "   latency against fcfs")
        lines += [_line(row, columns) for row in rows]
    return "\n".join((*lines[1:], "", *_legend(table)))


def _legend(table: Table) -> list[str]:
    """What the figures rest on, and what the words mean that only the table has."""
    seeds, requests = max(len(row.runs) for row in table.rows), f"{table.num_requests:,} " if table.num_requests else ""
    lines = [
        f"each cell: the mean of {seeds} run{'s' * (seeds > 1)} of {requests}requests, with the seed{'s' * (seeds > 1)} "
        f"{', '.join(map(str, range(seeds))) if seeds < 4 else f'0 to {seeds - 1}'}",
        _about_changes(seeds),
        "goodput: requests within both objectives per second of the time in which they arrive; Jain: of the tenants' fair shares",
    ]
    with_focus = {row.scenario.name: row.scenario for row in table.rows if row.scenario.focus}
    lines += [f"their (in {one.name}): of the tenants {', '.join(one.focus)}" for one in with_focus.values()]
    if any(_may_fail(row.scenario) for row in table.rows):
        lines.append("served: share of the requests; those that expired or were refused count in no latency")
    rows = {row.contender.name: row.contender for row in table.rows if row.contender.overrides}
    return lines + [f"{one.name}: {' '.join(one.words)}" for one in rows.values()]


def _about_changes(seeds: int) -> str:
    about = "latency against fcfs: change of the mean, of runs with the same seed"
    if seeds == 1:
        return f"{about}; one seed proves nothing: seeds=3 or more gives intervals"
    text = f"{about}, with a 95% interval"
    return f"{text}, which proves nothing with two seeds: seeds=3 or more" if seeds == 2 else text


def _may_fail(scenario: Scenario) -> bool:
    return scenario.traffic.get("ttl") is not None


def _columns(scenario: Scenario) -> tuple[Column, ...]:
    focus, served = FOCUS if scenario.focus else (), SERVED if _may_fail(scenario) else ()
    return (*COLUMNS, *focus, *served, *(CACHED if scenario.traffic.get("system_prompts") else ()))


def _width(column: Column) -> int:
    return max(len(column.title), 8) + 2


def _line(row: Row, columns: Sequence[Column]) -> str:
    name = f"{row.contender.name:<{NAME}}"
    if row.problem:
        return f"{name}failed: {row.problem}"
    cells = "".join(f"{_cell(row.mean(c.name), c):>{_width(c)}}" for c in columns)
    return name + cells + ("" if row.contender.name == BASELINE else f"   {row.change('mean_e2e_s')}")


def _cell(value: float, column: Column) -> str:
    return "-" if isnan(value) else column.form.format(value * (1000 if column.name in MILLI else 1))


def as_records(table: Table) -> list[dict[str, Any]]:
    """One flat record per row: means over the seeds, and what is known of the change in mean latency and TTFT."""
    return [_record(row, table.capacities[row.scenario.name]) for row in table.rows]


def _record(row: Row, rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scenario": row.scenario.name,
        "load": row.load,
        "rate": row.load * rate,
        "policy": row.contender.name,
        "overrides": " ".join(row.scenario.words(row.contender)),
        "seeds": len(row.runs),
        "problem": row.problem,
    }
    names = dict.fromkeys(name for run in row.runs for name in run.values)
    found |= {name: None if isnan(row.mean(name)) else row.mean(name) for name in names}
    for name in ("mean_e2e_s", "mean_ttft_s"):
        change = row.change(name)
        found |= {f"{name}_{word}": _finite(getattr(change, part)) for word, part in _CHANGE.items()}
    return found


_CHANGE = {"change": "mean", "change_low": "low", "change_high": "high"}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


# As pictures


def plot_table(table: Table, folder: str) -> None:
    """A PNG per block and kind: bars of mean and p99 TTFT, and how latencies are distributed. Needs matplotlib."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plot={folder}: {error.strerror or error}", "plot") from None
    for scenario, load, rows in table.blocks():
        good = [row for row in rows if not row.problem]
        title, stem = f"{scenario.name} at {load:g}x load", f"{scenario.name.replace(' ', '_')}_{load:g}x"
        series = {"mean TTFT in s": "mean_ttft_s", "p99 TTFT in s": "p99_ttft_s", "mean latency in s": "mean_e2e_s"}
        names = [row.contender.name for row in good]
        bars = {label: [row.mean(name) for row in good] for label, name in series.items()}
        plot_bars(names, bars, title, str(place / f"{stem}_bars.png"))
        curves = {row.contender.name: row.curve("focus_e2e_s" if scenario.focus else "e2e_s") for row in good}
        plot_curves(curves, f"latency in s: {title}", str(place / f"{stem}_latency.png"))
