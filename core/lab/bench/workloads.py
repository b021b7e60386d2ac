"""The workloads of `bench`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import ConfigError, near_matches
from core.lab.bench.streams import LongPrefill, SharedPrefix, Structured
from core.lab.bench.workload import Closed, Offline, Open, Single, Workload, WorkloadSettings
from core.simulation.keys import checked

DEFAULT = "closed"
WORKLOADS: Mapping[str, Callable[[Any], Workload] | Any] = {
    "single": Single,
    "offline": Offline,
    "closed": Closed,
    "open": Open,
    "shared_prefix": SharedPrefix,
    "long_prefill": LongPrefill,
    "structured": Structured,
}


def open_workload(name: str, values: Mapping[str, Any]) -> Workload:
    """Raises ConfigError with near matches for a name or a key that there is not, and for a value that is none."""
    kind = workload_class(name)
    settings: WorkloadSettings = checked(kind.Settings, values)
    made: Workload = kind(settings)
    return made


def workload_class(name: str) -> Any:
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}{near_matches(name, WORKLOADS)}", "workload")
    return WORKLOADS[name]


def line_of(name: str) -> str:
    return (workload_class(name).__doc__ or "").strip()
