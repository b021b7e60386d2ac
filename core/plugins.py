"""Which plugins exist: the built-in list, entry points, what is disabled, what failed. Imports no torch.

Installing is not activating: a plugin adds names; only config turns a name into a running object. A third party's plugin
that cannot be used is recorded with its reason, and provides nothing; `Plugins.check_start` is what refuses to start.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Literal

from packaging.utils import canonicalize_name

from core.components import PluginRecord, Provided
from core.errors import ConfigError, PluginError, near_matches
from core.loading.api import LITERAL, check_api
from core.loading.listing import Listing, list_entry_point, list_plugin
from core.other_names import unknown_component
from core.version import nonet_version

ENTRY_POINT_GROUP = "nonet.plugins"
DISABLE_VARIABLE = "NONET_PLUGINS_DISABLE"
"""Comma-separated plugin or distribution names that are not loaded; `all` leaves the built-ins alone."""
START_TIMEOUT_VARIABLE = "NONET_PLUGINS_START_TIMEOUT"
"""Seconds that loading one plugin may take, where `plugins.start_timeout` says nothing."""
START_TIMEOUT_S = 10.0
MAX_START_TIMEOUT_S = 3600.0

BUILTINS = (
    "core.builtin",
    "plugins.frontends",
    "plugins.schedulers",
    "plugins.samplers",
    "plugins.grammars",
    "plugins.logits_processors",
    "plugins.models",
    "plugins.attention",
    "plugins.quant",
    "plugins.cpu",
    "plugins.tool_parsers",
    "plugins.reasoning_parsers",
    "plugins.predictors",
    "plugins.observers",
)
"""Modules with our own hooks, registered through the same door as a stranger's: the same order everywhere, also in a bare
checkout."""

UNKNOWN = "unknown"  # name of a distribution without metadata

OnFailure = Literal["refuse", "disable"]

logger = logging.getLogger("nonet.plugins")


@dataclass(frozen=True, slots=True)
class Plugins:
    """All plugins of this process and the components they provide."""

    records: tuple[PluginRecord, ...]
    _provided: Mapping[tuple[str, str], Provided] = field(repr=False)

    def names(self, group: str) -> tuple[str, ...]:
        return tuple(name for g, name in self._provided if g == group)

    def components(self, group: str) -> tuple[Provided, ...]:
        return tuple(p for (g, _), p in self._provided.items() if g == group)

    def find(self, group: str, name: str) -> Provided:
        """The component that config selects. Raises PluginError with near matches, and with what failed to load."""
        found = self._provided.get((group, name))
        if found is None:
            raise PluginError(f"{unknown_component(group, name, self.names(group))}{self.failures()}")
        return found

    def failed(self) -> tuple[PluginRecord, ...]:
        return tuple(record for record in self.records if record.status == "failed")

    def failures(self) -> str:
        """What an unknown name may be due to: `; plugins that failed to load: …`, or nothing."""
        return f"; plugins that failed to load: {_reasons(self.failed())}" if self.failed() else ""

    def check_start(self, on_failure: OnFailure) -> None:
        """What is installed and cannot be used: refuse to start (PluginError), or say so once in the log and go on."""
        failed = self.failed()
        if failed and on_failure == "refuse":
            raise PluginError(
                f"installed plugins cannot be used: {_reasons(failed)}; go on without: "
                f"plugins.disable=[{','.join(self.to_disable(failed))}] or plugins.on_failure=disable"
            )
        for record in failed:
            logger.warning("plugin %s is left out: %s", record.who, record.reason)

    def left_out(self) -> tuple[str, ...]:
        """What another process must disable to have the same plugins as this one."""
        return self.to_disable([record for record in self.records if record.status != "loaded"])

    def to_disable(self, records: Iterable[PluginRecord]) -> tuple[str, ...]:
        """Names for `plugins.disable`: the plugin's, or its distribution's where another plugin is called so too."""
        taken = Counter(record.name for record in self.records)
        return tuple(dict.fromkeys(r.name if taken[r.name] == 1 else r.distribution for r in records))

    def config_packages(self) -> tuple[str, ...]:
        return tuple(package for record in self.records for package in record.config_packages)

    def fingerprint(self) -> list[str]:
        """`plugin==version` of everything loaded; both processes must agree on it."""
        return sorted(f"{r.name}=={r.version}" for r in self.records if r.status == "loaded")


def _reasons(records: Iterable[PluginRecord]) -> str:
    return " | ".join(f"{record.who}: {record.reason}" for record in records)


def default_start_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds, from the environment or ours. Raises ConfigError for a value that is no positive number."""
    text = environ.get(START_TIMEOUT_VARIABLE, "") or str(START_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_START_TIMEOUT_S:
        raise ConfigError(
            f"{START_TIMEOUT_VARIABLE}={text}: write seconds, more than 0 and at most {MAX_START_TIMEOUT_S:g}"
        )
    return seconds


def load_plugins(
    disable: Iterable[str] = (), environ: Mapping[str, str] = os.environ, start_timeout: float | None = None
) -> Plugins:
    """Load built-ins (failures are errors), then entry points by name (failures are recorded).

    `start_timeout`: seconds that loading one may take; None: see START_TIMEOUT_VARIABLE. Raises PluginError where
    `disable` names nothing that is installed.
    """
    disable = tuple(disable)
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    _refuse_unknown(disable, points)
    disabled = {*map(_canonical, (*disable, *filter(None, environ.get(DISABLE_VARIABLE, "").split(","))))}
    timeout_s = default_start_timeout(environ) if start_timeout is None else start_timeout
    ours = nonet_version()
    records = [_load_builtin(name, ours) for name in BUILTINS]
    records += [_load_entry_point(point, disabled, timeout_s) for point in points]
    records = _without_clashes(records)
    provided = {(g, c.name): Provided(g, c, record) for record in records for g, c in record.components}
    return Plugins(tuple(records), provided)


def _refuse_unknown(disable: Iterable[str], points: Sequence[EntryPoint]) -> None:
    names = {name for point in points for name in (point.name, distribution_of(point.dist)[0])}
    known = {_canonical(name) for name in (*names, "all")}
    for name in disable:
        if name in BUILTINS:
            raise PluginError(
                f"plugins.disable: {name!r} is built in, and stays; only installed plugins can be left out"
            )
        if _canonical(name) not in known:
            hint = near_matches(name, names) or "; none is installed"
            raise PluginError(f"plugins.disable: no plugin or distribution is called {name!r}{hint}")


def _canonical(name: str) -> str:
    """A plugin's name and a distribution's may be written acme_one or Acme-One."""
    return canonicalize_name(name.strip())


def _load_builtin(name: str, version: str) -> PluginRecord:
    module = importlib.import_module(name)
    listing = list_plugin(module, check_api(getattr(module, LITERAL, None), "nonet"))
    return _loaded(PluginRecord(name, "nonet", version, "loaded", builtin=True), listing)


def _load_entry_point(point: EntryPoint, disabled: set[str], timeout_s: float) -> PluginRecord:
    distribution, version = distribution_of(point.dist)
    record = PluginRecord(point.name, distribution, version, "disabled", "disabled by config or environment")
    if disabled & {_canonical(point.name), _canonical(distribution), "all"}:
        return record
    try:
        return _loaded(record, list_entry_point(point, distribution, timeout_s))
    except PluginError as error:
        return record.failed(str(error))


def _loaded(record: PluginRecord, listing: Listing) -> PluginRecord:
    return replace(
        record,
        status="loaded",
        reason="",
        components=listing.components,
        config_packages=listing.config_packages,
        hooks=listing.hooks,
        api=listing.api,
        warnings=listing.warnings,
    )


def distribution_of(dist: Distribution | None) -> tuple[str, str]:
    """Name and version; UNKNOWN for one without metadata."""
    try:
        return (dist.metadata["Name"] or UNKNOWN, dist.version or "0") if dist is not None else (UNKNOWN, "0")
    except Exception:  # what an uninstall left behind has entry points and no metadata; `doctor` finds it
        return UNKNOWN, "0"


def _without_clashes(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """A name that two plugins claim belongs to neither, as nobody can tell which was meant; a built-in keeps its own."""
    plugins: dict[object, list[PluginRecord]] = defaultdict(list)
    owners: dict[object, list[PluginRecord]] = defaultdict(list)
    for record in records:
        if record.status != "disabled":
            plugins[record.name].append(record)
        for group, component in record.components:
            owners[group, component.name].append(record)
    return [record if record.builtin else _taken(record, plugins, owners) for record in records]


def _taken(
    record: PluginRecord,
    plugins: Mapping[object, Sequence[PluginRecord]],
    owners: Mapping[object, Sequence[PluginRecord]],
) -> PluginRecord:
    for other in plugins.get(record.name, ()):
        if record.status != "disabled" and other is not record:
            return record.failed(
                f"the plugin name {record.name!r} is also that of {other.wheel}; uninstall or disable one of them"
            )
    for group, component in record.components:
        for other in owners[group, component.name]:
            if other is not record:
                way_out = "rename it" if other.builtin else "uninstall or disable one of them"
                return record.failed(f"its {group}={component.name} is also provided by {other.who}; {way_out}")
    return record
