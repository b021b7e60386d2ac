"""`simulate`: a scheduler and its settings on simulated traffic, without a model. Also `simulate table`, `fit` and `compare`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from core.commands.request_arguments import split
from core.config.keys import fields_of, validated
from core.config.overrides import ROOTS
from core.errors import ConfigError, near_matches
from core.process import collect_rarely
from core.session import log_to_stderr
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.files import check_writable, write_text
from core.simulation.load import at_load
from core.simulation.loop import simulate
from core.simulation.report import ReportSettings, report, text
from core.simulation.traffic import TrafficSettings, open_traffic

S = TypeVar("S", bound=BaseModel)


class OutputSettings(BaseModel):
    """Where the figures go beside the terminal."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    output: str | None = Field(default=None, description="a JSON file to write")


def run(arguments: Sequence[str]) -> int:
    """`simulate scheduler=srtf workload=conversation load=0.9`, or one of the commands of `COMMANDS`."""
    log_to_stderr(logging.WARNING)
    command = COMMANDS.get(arguments[0]) if arguments else None
    return command(arguments[1:]) if command else _simulate(arguments)


def _simulate(arguments: Sequence[str]) -> int:
    parts = split(arguments)
    check_keys(parts.request, (TrafficSettings, SimulationSettings, ReportSettings, OutputSettings))
    asked, settings = chosen(TrafficSettings, parts.request), chosen(SimulationSettings, parts.request)
    reported, written = chosen(ReportSettings, parts.request), chosen(OutputSettings, parts.request)
    check_writable("output", written.output)
    offered = at_load(asked, parts.overrides, settings)
    traffic = open_traffic(offered)
    simulation = open_simulation(parts.overrides, settings, traffic.shares_content)
    collect_rarely()
    with tqdm(total=offered.num_requests, desc="requests", file=sys.stderr, disable=None) as bar:
        result = simulate(simulation, traffic, lambda ended: bar.update(ended - bar.n))
    figures = report(result, reported)
    print(text(figures))
    if written.output:
        about = {"config": parts.overrides, "traffic": offered.model_dump(), "simulation": settings.model_dump()}
        write_text("output", written.output, json.dumps({**about, **figures}, indent=2))
    if reported.plot:
        from core.simulation.plots import plot

        plot(result, reported.plot)
    return 0


def check_keys(values: Mapping[str, Any], models: Sequence[type[BaseModel]]) -> None:
    """Raises ConfigError for a key that none of the models has."""
    known = [key for model in models for key in fields_of(model)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}{near_matches(key, [*known, *ROOTS])}", key)


def chosen(model: type[S], values: Mapping[str, Any]) -> S:
    """What of `values` is the model's. Raises ConfigError naming the key."""
    return validated(model, {key: value for key, value in values.items() if key in fields_of(model)}, "simulate")


def _fit(arguments: Sequence[str]) -> int:
    from core.simulation.fit import FitSettings, fit, text

    parts = split(arguments)
    settings = validated(FitSettings, parts.request, "fit")
    check_writable("output", settings.output)
    cost = fit(parts.overrides, settings)
    print(text(cost))
    write_text("output", settings.output, cost.model_dump_json(indent=2))
    return 0


def _compare(arguments: Sequence[str]) -> int:
    """Exit code 1 where the simulator is too far off."""
    from core.simulation.compare import CompareSettings, compare, error, text

    parts = split(arguments)
    settings = validated(CompareSettings, parts.request, "compare")
    check_writable("output", settings.output)
    found = compare(parts.overrides, settings)
    print(text(found))
    if settings.output:
        write_text("output", settings.output, json.dumps(found, indent=2))
    return int(error(found) > settings.max_error)


def _table(arguments: Sequence[str]) -> int:
    """Exit code 1 where a policy failed."""
    from core.simulation.table import TableSettings, make_table, write_files
    from core.simulation.table_text import as_text

    parts = split(arguments)
    if parts.overrides:
        raise ConfigError(
            f"{parts.overrides[0]!r}: a table has its own machine and policies; write policies=fcfs,srtf or scenarios=code"
        )
    settings = validated(TableSettings, parts.request, "table")
    table = make_table(settings)
    print(as_text(table))
    write_files(table, settings)
    return int(any(row.problem for row in table.rows))


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"fit": _fit, "compare": _compare, "table": _table}
"""Words after `simulate`."""
