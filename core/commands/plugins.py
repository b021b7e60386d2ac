"""`plugins`: every plugin found, with wheel, version, status and what it provides; and the tools of plugin authors, each in
`core/commands/plugins_<word>.py`. Imports no torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from core.capabilities import unknown_words
from core.components import PluginRecord
from core.errors import ConfigError, near_matches
from core.hookspecs import Component
from core.plugins import Plugins, load_plugins

TOOLS = {
    "check": "run the conformance suites against what a plugin provides",
    "new": "write a new plugin package",
    "matrix": "which components work together",
    "faults": "what a failing plugin of each stage does to the other requests",
}
HELP = frozenset(("-h", "--help"))
USAGE = f"usage: plugins [list] [--json] | {' | '.join(f'{tool} …' for tool in TOOLS)}"


def run(arguments: Sequence[str]) -> int:
    word, rest = (arguments[0], arguments[1:]) if arguments else ("list", [])
    if word in TOOLS:
        tool = importlib.import_module(f"core.commands.plugins_{word}")
        if not HELP.isdisjoint(rest):
            print(f"{tool.USAGE}\n{TOOLS[word]}")
            return 0
        return int(tool.run(rest))
    if word.startswith("-"):
        word, rest = "list", arguments
    if word != "list":
        raise ConfigError(f"unknown word {word!r}{near_matches(word, ('list', *TOOLS))}; {USAGE}")
    if unknown := [argument for argument in rest if argument != "--json"]:
        raise ConfigError(f"unknown argument {unknown[0]!r}; {USAGE}")
    _list(as_json="--json" in rest)
    return 0


def _list(*, as_json: bool) -> None:
    plugins = load_plugins()
    records = [_with_warnings(record, plugins) for record in plugins.records]
    if as_json:
        print(json.dumps([row(record) for record in records], indent=2, ensure_ascii=False))
        return
    for record in records:
        print("\n".join(_lines(record)))


def _with_warnings(record: PluginRecord, plugins: Plugins) -> PluginRecord:
    """Also of what can only be said beside all others."""
    return replace(record, warnings=(*record.warnings, *unknown_words(record, plugins)))


def _lines(record: PluginRecord) -> Iterator[str]:
    api = f", API {record.api}" if record.api else ""
    yield f"{_column(record.name, 24)}{_column(record.wheel, 24)}{record.status}{api}"
    if record.reason:
        yield f"    {record.reason}"
    for warning in record.warnings:
        yield f"    warning: {warning}"
    for group, component in record.components:
        yield f"    {_column(f'{group}={component.name}', 34)}{component.summary}"
        if terms := _terms(component):
            yield f"{'':<38}{terms}"


def _column(text: str, width: int) -> str:
    """At least two spaces follow, also after a text that is wider."""
    return f"{text:<{width - 2}}  "


def _terms(component: Component) -> str:
    """What it offers and asks, in words: provides drafts; requires sampler.logits_processors; device: cuda."""
    said = (
        ("provides", component.provides),
        ("requires", component.requires),
        ("conflicts with", component.conflicts),
    )
    terms = [f"{word} {', '.join(names)}" for word, names in said if names]
    return "; ".join([*terms, *(f"{fact}: {', '.join(map(str, v))}" for fact, v in component.accepts.items())])


def row(record: PluginRecord) -> dict[str, Any]:
    """One plugin as `--json` has it."""
    return {
        "plugin": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "status": record.status,
        "reason": record.reason,
        "warnings": list(record.warnings),
        "builtin": record.builtin,
        "api": record.api,
        "hooks": list(record.hooks),
        "config_packages": list(record.config_packages),
        "components": [_component_row(group, component) for group, component in record.components],
    }


def _component_row(group: str, component: Component) -> dict[str, Any]:
    return {
        "group": group,
        "name": component.name,
        "target": component.target,
        "summary": component.summary,
        "settings": component.settings or f"{component.target}.Settings",
        "provides": list(component.provides),
        "requires": list(component.requires),
        "conflicts": list(component.conflicts),
        "accepts": {fact: list(values) for fact, values in component.accepts.items()},
        "params": component.params,
    }
