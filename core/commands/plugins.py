"""`plugins`: every plugin found, with wheel, version, status and what it provides. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from core.errors import ConfigError
from core.plugins import PluginRecord, load_plugins


def run(arguments: Sequence[str]) -> int:
    rest = [a for a in arguments if a not in ("list", "--json")]
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; usage: plugins [list] [--json]")
    records = load_plugins().records
    if "--json" in arguments:
        print(json.dumps([row(record) for record in records], indent=2, ensure_ascii=False))
        return 0
    for record in records:
        print(f"{record.name:<24}{record.distribution} {record.version:<14}{record.status}")
        if record.reason:
            print(f"{'':<4}{record.reason}")
        for group, component in record.components:
            print(f"{'':<4}{group + '=' + component.name:<30}{component.summary}")
    return 0


def row(record: PluginRecord) -> dict[str, Any]:
    return {
        "plugin": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "status": record.status,
        "reason": record.reason,
        "builtin": record.builtin,
        "hooks": list(record.hooks),
        "components": [
            {"group": g, "name": c.name, "target": c.target, "summary": c.summary, "api_version": c.api_version}
            for g, c in record.components
        ],
    }
