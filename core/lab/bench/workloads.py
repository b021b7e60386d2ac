"""The workloads of `bench`, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from core.config.keys import fields_of
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


def open_workload(name: str, values: Mapping[str, Any], also: Collection[str] = ()) -> Workload:
    """Raises ConfigError for a name or a key that there is not, and for a value that is none. A key is told with its near
    matches, which those of the command are among (`also`), or with the workloads that it is of."""
    kind = workload_class(name)
    known = {*fields_of(kind.Settings), *also}
    for key in (key for key in values if key not in known):
        owners = [other for other in WORKLOADS if key in fields_of(workload_class(other).Settings)]
        near = f"; it is a key of workload={', '.join(owners)}" if owners else near_matches(key, known)
        raise ConfigError(f"workload={name} has no key {key!r}{near}", key, unknown=True)
    settings: WorkloadSettings = checked(kind.Settings, values)
    made: Workload = kind(settings)
    return made


def workload_class(name: str) -> Any:
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}{near_matches(name, WORKLOADS)}", "workload")
    return WORKLOADS[name]


def line_of(name: str) -> str:
    return (workload_class(name).__doc__ or "").strip()
