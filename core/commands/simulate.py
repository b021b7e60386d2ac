"""`simulate`: a scheduler and its settings on simulated traffic, without a model. Also `simulate table`, `fit` and `compare`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from core.commands.request_arguments import split
from core.config.overrides import ROOTS
from core.errors import ConfigError, near_matches
from core.process import collect_rarely
from core.session import log_to_stderr
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.cost import doubt
from core.simulation.course import Course, say
from core.simulation.files import check_writable, write_text
from core.simulation.keys import check_known, checked, chosen, described_keys
from core.simulation.load import at_load
from core.simulation.loop import simulate
from core.simulation.report import ReportSettings, report, text
from core.simulation.traffic import TrafficSettings, open_traffic

HELP = ("-h", "--help")


class OutputSettings(BaseModel):
    """Where the figures go beside the terminal."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    output: str | None = Field(default=None, description="a JSON file to write: all figures, and what was asked")


@dataclass(frozen=True, slots=True)
class Command:
    """One of the words after `simulate`, or none of them. `models`: its keys, looked up only when they are printed."""

    run: Callable[[Sequence[str]], int]
    about: str
    example: str
    models: Callable[[], Sequence[type[BaseModel]]]


def run(arguments: Sequence[str]) -> int:
    """`simulate scheduler=srtf workload=conversation load=0.9`, or one of the commands of `COMMANDS`."""
    log_to_stderr(logging.WARNING)
    word = arguments[0] if arguments else ""
    if word and word not in HELP and word[0] not in "+~" and "=" not in word and word not in COMMANDS:
        raise ConfigError(f"simulate has no command {word!r}{near_matches(word, COMMANDS)}")
    command, rest = (COMMANDS[word], arguments[1:]) if word in COMMANDS else (SIMULATE, arguments)
    if any(each in HELP for each in rest):
        print(_help(command, word if word in COMMANDS else ""))
        return 0
    return command.run(rest)


def _help(command: Command, word: str) -> str:
    name = f"nonet simulate {word}".rstrip()
    lines = [f"{name}: {command.about}", f"for example: {name} {command.example}"]
    if not word:
        lines += [f"also `{name} {other} --help`: {each.about}" for other, each in COMMANDS.items()]
    for model in command.models():
        lines += ["", *described_keys(model)]
    if word != "table":
        lines += ["", "Words with a dot, and those that select a component, are config: `nonet explain` prints it."]
    return "\n".join(lines)


def _simulate(arguments: Sequence[str]) -> int:
    parts = split(arguments)
    check_known(parts.request, _simulate_models(), ROOTS)
    asked, settings = chosen(TrafficSettings, parts.request), chosen(SimulationSettings, parts.request)
    reported, written = chosen(ReportSettings, parts.request), chosen(OutputSettings, parts.request)
    check_writable("output", written.output)
    offered = at_load(asked, parts.overrides, settings)
    traffic = open_traffic(offered)
    simulation = open_simulation(parts.overrides, settings, traffic.shares_content)
    _warn(doubt(simulation.cost))
    collect_rarely()
    with Course("requests", offered.num_requests) as course:
        result = simulate(simulation, traffic, course.at)
    figures = report(result, reported)
    print(text(figures))
    if written.output:
        about = {"config": parts.overrides, "traffic": offered.model_dump(), "simulation": settings.model_dump()}
        write_text("output", written.output, json.dumps({**about, **figures}, indent=2))
    if reported.plot:
        from core.simulation.plots import plot

        plot(result, reported.plot)
    return 0


def _warn(text: str) -> None:
    if text:
        say(f"nonet simulate: {text}")


def _fit(arguments: Sequence[str]) -> int:
    from core.simulation.fit import FitSettings, fit, text

    parts = split(arguments)
    settings = checked(FitSettings, parts.request)
    check_writable("output", settings.output)
    cost = fit(parts.overrides, settings)
    print(text(cost))
    write_text("output", settings.output, cost.model_dump_json(indent=2))
    _warn(doubt(cost))
    return 0


def _compare(arguments: Sequence[str]) -> int:
    """Exit code 1 where the simulator is too far off."""
    from core.simulation.compare import CompareSettings, compare, error, text

    parts = split(arguments)
    settings = checked(CompareSettings, parts.request)
    check_writable("output", settings.output)
    found = compare(parts.overrides, settings)
    print(text(found))
    _warn(found["doubt"])
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
    settings = checked(TableSettings, parts.request)
    table = make_table(settings)
    print(as_text(table))
    write_files(table, settings)
    return int(any(row.problem for row in table.rows))


def _simulate_models() -> Sequence[type[BaseModel]]:
    return (TrafficSettings, SimulationSettings, ReportSettings, OutputSettings)


def _fit_models() -> Sequence[type[BaseModel]]:
    from core.simulation.fit import FitSettings

    return (FitSettings,)


def _compare_models() -> Sequence[type[BaseModel]]:
    from core.simulation.compare import CompareSettings

    return (CompareSettings,)


def _table_models() -> Sequence[type[BaseModel]]:
    from core.simulation.table import TableSettings

    return (TableSettings,)


SIMULATE = Command(
    _simulate,
    "a scheduler and its settings on simulated traffic, without a model",
    "scheduler=srtf workload=conversation load=0.9",
    _simulate_models,
)
COMMANDS: Mapping[str, Command] = {
    "fit": Command(
        _fit, "measure what steps cost on this machine, for cost=…", "output=cost.json +preset=chat", _fit_models
    ),
    "compare": Command(
        _compare, "the same requests through the engine and simulated", "num_requests=200 +preset=chat", _compare_models
    ),
    "table": Command(
        _table, "every policy on the same traffic", "size=small policies=fcfs,srtf json=table.json", _table_models
    ),
}
"""Words after `simulate`."""
