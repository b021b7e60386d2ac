"""What listing one plugin does to a fresh process: `python -m core.testing.import_probe PLUGIN`, a JSON object on stdout.

Run in an empty folder that is home, working and temporary directory: what lies there afterwards was written by the plugin.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from core.components import PluginRecord
from core.loading.listing import HEAVY
from core.plugins import BUILTINS, ENTRY_POINT_GROUP, Plugins, distribution_of, load_plugins


def others_than(plugin: str) -> tuple[str, ...]:
    """What to disable so that, of third parties, only this plugin is loaded; a sibling called like its wheel stays."""
    if plugin in BUILTINS:
        return ("all",)
    points = entry_points(group=ENTRY_POINT_GROUP)
    own = {canonicalize_name(distribution_of(p.dist)[0]) for p in points if p.name == plugin}
    return tuple({p.name for p in points if p.name != plugin and canonicalize_name(p.name) not in own})


def record_of(plugins: Plugins, plugin: str) -> PluginRecord:
    return next(record for record in plugins.records if record.name == plugin)


def main(plugin: str) -> None:
    load_plugins(("all",))  # ours, so that what changes from here on is the plugin's doing
    before, printed = state(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        record = record_of(load_plugins(others_than(plugin)), plugin)
    listed, changed = heavy(), changes(before, state())
    if printed.getvalue().strip():
        changed.append(f"prints {printed.getvalue().strip()[:60]!r}")
    for _, component in record.components:
        for path in filter(None, (component.settings, component.params)):
            with contextlib.suppress(Exception):  # that it cannot be imported is another check's to say
                importlib.import_module(path.partition(":")[0])
    answer = {"warnings": record.warnings, "listing": listed, "settings": heavy(), "changed": changed}
    print(json.dumps(answer))


def heavy() -> list[str]:
    return [name for name in HEAVY if name in sys.modules]


def state() -> dict[str, Any]:
    """What an import must leave as it is."""
    root = logging.getLogger()
    return {
        "threads": [t.name for t in threading.enumerate() if not t.name.startswith("load plugin")],
        "environment variables": dict(os.environ),
        "handlers of the root logger": [repr(handler) for handler in root.handlers],
        "level of the root logger": root.level,
        "sys.path": list(sys.path),
        "warning filters": [repr(rule) for rule in warnings.filters],
        "signal handlers": {
            number.name: repr(signal.getsignal(number)) for number in signal.valid_signals() if _named(number)
        },
        "files": sorted(str(path) for path in Path.cwd().rglob("*") if "__pycache__" not in path.parts),
        "working directory": str(Path.cwd()),
    }


def _named(number: object) -> bool:
    return isinstance(number, signal.Signals)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"changes {name}{_difference(before[name], after[name])}" for name in before if before[name] != after[name]]


def _difference(before: Any, after: Any) -> str:
    if isinstance(after, list):
        more = [entry for entry in after if entry not in before]
        return f": {', '.join(more[:3])}" if more else ""
    if isinstance(after, dict):
        return f": {', '.join(sorted(key for key in {*before, *after} if before.get(key) != after.get(key))[:3])}"
    return f": {after}"


if __name__ == "__main__":
    main(sys.argv[1])
