"""Which plugins exist: the built-in list, entry points, enable and disable, isolation of failures. Imports no torch.

Installing is not activating: a plugin adds names; only config turns a name into a running object. Observers of third
parties run only when `plugins.enable` lists their plugin.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

import pluggy

from core import hookspecs
from core.errors import PluginError, near_matches
from core.hookspecs import API_VERSION, GROUPS, PROJECT, Component
from core.version import nonet_version

ENTRY_POINT_GROUP = "nonet.plugins"
DISABLE_VARIABLE = "NONET_PLUGINS_DISABLE"
"""Comma-separated plugin or distribution names that are not loaded; `all` leaves the built-ins alone."""

EVENTS = ("step_finished", "request_finished")

BUILTINS = (
    "core.builtin",
    "core.metrics:Metrics",
    "plugins.frontends",
    "plugins.schedulers",
    "plugins.samplers",
    "plugins.models",
    "plugins.attention",
    "plugins.quant",
)
"""Modules (or "module:Class", one object per process) with our own hooks, registered through the same door as a stranger's:
the same order everywhere, also in a bare checkout."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin as found. `status` is loaded, disabled or failed; `reason` says why when it is not loaded."""

    name: str
    distribution: str
    version: str
    status: str
    reason: str = ""
    builtin: bool = False
    components: tuple[tuple[str, Component], ...] = ()  # (group, component)
    config_packages: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Provided:
    """A component together with the plugin that provides it."""

    group: str
    component: Component
    plugin: PluginRecord


@dataclass(frozen=True, slots=True)
class Plugins:
    """All plugins of this process and the components they provide."""

    records: tuple[PluginRecord, ...]
    _provided: Mapping[tuple[str, str], Provided] = field(repr=False)
    _conflicts: Mapping[tuple[str, str], tuple[str, ...]] = field(repr=False)
    _observers: Mapping[str, tuple[tuple[str, Callable[..., None]], ...]] = field(repr=False)
    _objects: Mapping[str, object] = field(repr=False)

    def plugin_object(self, name: str) -> Any:
        """The registered module or object of a loaded plugin, e.g. `core.metrics.Metrics` of "core.metrics"."""
        return self._objects[name]

    def names(self, group: str) -> tuple[str, ...]:
        return tuple(name for g, name in self._provided if g == group)

    def components(self, group: str) -> tuple[Provided, ...]:
        return tuple(p for (g, _), p in self._provided.items() if g == group)

    def find(self, group: str, name: str) -> Provided:
        """The component that config selects. Raises PluginError: unknown (near matches), claimed twice, or failed to load."""
        claimed = self._conflicts.get((group, name))
        if claimed:
            raise PluginError(
                f"{group}={name} is provided by more than one plugin: {', '.join(claimed)}; "
                f"disable all but one with plugins.disable=[…]"
            )
        found = self._provided.get((group, name))
        if found is not None:
            return found
        raise PluginError(f"no {group} is called {name!r}{near_matches(name, self.names(group))}{self.failures()}")

    def failures(self) -> str:
        """What an unknown name may be due to: `; plugins that failed to load: …`, or nothing."""
        failed = [f"{r.name} ({r.distribution} {r.version}): {r.reason}" for r in self.records if r.status == "failed"]
        return f"; plugins that failed to load: {' | '.join(failed)}" if failed else ""

    def observers(self, event: str, enabled: Iterable[str]) -> tuple[Callable[..., None], ...]:
        """Plain functions for `step_finished` or `request_finished`: built-in ones, and those of enabled plugins."""
        enabled = set(enabled)
        builtin = {r.name for r in self.records if r.builtin}
        return tuple(fn for plugin, fn in self._observers.get(event, ()) if plugin in builtin or plugin in enabled)

    def check_enabled(self, names: Iterable[str]) -> None:
        """Raises PluginError for a name of `plugins.enable` whose observers cannot run: unknown, disabled or failed."""
        records = {record.name: record for record in self.records}
        third_party = [record.name for record in self.records if not record.builtin]
        for name in names:
            record = records.get(name)
            if record is None:
                raise PluginError(f"plugins.enable: no plugin is called {name!r}{near_matches(name, third_party)}")
            if record.status != "loaded":
                raise PluginError(f"plugins.enable: the plugin {name!r} is not loaded: {record.reason}")

    def config_packages(self) -> tuple[str, ...]:
        return tuple(package for r in self.records if r.status == "loaded" for package in r.config_packages)

    def fingerprint(self) -> list[str]:
        """`plugin==version` of everything loaded; both processes must agree on it."""
        return sorted(f"{r.name}=={r.version}" for r in self.records if r.status == "loaded")


def load_plugins(disable: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> Plugins:
    """Load built-ins (failures are errors), then entry points by name (failures are recorded, and the plugin is left out)."""
    disabled = {*disable, *filter(None, environ.get(DISABLE_VARIABLE, "").split(","))}
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    records = [_load_builtin(manager, name) for name in BUILTINS]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        records.append(_load_entry_point(manager, point, disabled))
    return _index(manager, records)


def _load_builtin(manager: pluggy.PluginManager, name: str) -> PluginRecord:
    module_name, _, class_name = name.partition(":")
    module = importlib.import_module(module_name)
    plugin = getattr(module, class_name)() if class_name else module
    manager.register(plugin, module_name)
    return _describe(manager, plugin, module_name, "nonet", nonet_version(), builtin=True)


def _load_entry_point(manager: pluggy.PluginManager, point: EntryPoint, disabled: set[str]) -> PluginRecord:
    dist_name, version = _distribution_of(point.dist)
    if disabled & {point.name, dist_name, "all"}:
        return PluginRecord(point.name, dist_name, version, "disabled", "disabled by config or environment")
    if manager.has_plugin(point.name):
        reason = f"the plugin name {point.name!r} is taken; the entry point must be renamed"
        return PluginRecord(point.name, dist_name, version, "failed", reason)
    plugin: object | None = None
    try:
        plugin = point.load()
        manager.register(plugin, point.name)
        _refuse_unknown_hooks(manager, plugin)
        for event in EVENTS:
            _observers(manager, event)  # raises for this plugin's: those before it have passed
        return _describe(manager, plugin, point.name, dist_name, version, builtin=False)
    except (Exception, SystemExit) as error:  # a stranger's code may raise anything; it must not take the others down
        if plugin is not None and manager.is_registered(plugin):
            manager.unregister(plugin)
        return PluginRecord(point.name, dist_name, version, "failed", f"{type(error).__name__}: {error}")


def _distribution_of(dist: Distribution | None) -> tuple[str, str]:
    return (dist.metadata["Name"], dist.version) if dist is not None else ("unknown", "0")


def _refuse_unknown_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    known = {n for n in dir(hookspecs) if getattr(getattr(hookspecs, n), f"{PROJECT}_spec", None) is not None}
    for caller in manager.get_hookcallers(plugin) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin and not caller.has_spec() and not impl.optionalhook:
                raise PluginError(f"it implements an unknown hook {caller.name!r}{near_matches(caller.name, known)}")


def _describe(
    manager: pluggy.PluginManager, plugin: object, name: str, dist_name: str, version: str, *, builtin: bool
) -> PluginRecord:
    callers = manager.get_hookcallers(plugin) or []
    hooks = tuple(sorted(caller.name for caller in callers))
    components = tuple((group, c) for group in GROUPS for c in _components(manager, plugin, group))
    packages = _config_packages(manager, plugin)
    return PluginRecord(name, dist_name, version, "loaded", "", builtin, components, packages, hooks)


def _yielded(manager: pluggy.PluginManager, plugin: object, hook: str) -> Iterable[Any]:
    """What one plugin's implementations of a `provide_…` hook give; none where it has no such hook."""
    others = [other for other in manager.get_plugins() if other is not plugin]
    for found in manager.subset_hook_caller(hook, others)():
        yield from found


def _config_packages(manager: pluggy.PluginManager, plugin: object) -> tuple[str, ...]:
    packages = tuple(_yielded(manager, plugin, "provide_config_packages"))
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise PluginError(f"provide_config_packages yields {package!r}, and there is no such package")
    return packages


def _components(manager: pluggy.PluginManager, plugin: object, group: str) -> Iterable[Component]:
    for component in _yielded(manager, plugin, f"provide_{group}s"):
        if not isinstance(component, Component):
            raise PluginError(f"provide_{group}s must yield core.hookspecs.Component, not {type(component).__name__}")
        if component.api_version != API_VERSION:
            raise PluginError(
                f"{group}={component.name} is built for plugin API {component.api_version}, this is {API_VERSION}; "
                "install a release of the plugin for this version"
            )
        yield component


def _index(manager: pluggy.PluginManager, records: list[PluginRecord]) -> Plugins:
    provided: dict[tuple[str, str], Provided] = {}
    conflicts: dict[tuple[str, str], tuple[str, ...]] = {}
    for record in records:
        for group, component in record.components:
            key = (group, component.name)
            if key in provided:
                first = provided[key].plugin.name
                conflicts[key] = (*conflicts.get(key, (first,)), record.name)
            else:
                provided[key] = Provided(group, component, record)
    observers = {event: _observers(manager, event) for event in EVENTS}
    return Plugins(tuple(records), provided, conflicts, observers, dict(manager.list_name_plugin()))


def _observers(manager: pluggy.PluginManager, event: str) -> tuple[tuple[str, Callable[..., None]], ...]:
    """Bound past pluggy, whose call costs 30 times a plain one: so wrappers, and other argument lists, are refused here."""
    bound = []
    for impl in getattr(manager.hook, event).get_hookimpls():
        if impl.wrapper or impl.hookwrapper or len(impl.argnames) != 1:
            raise PluginError(f"plugin {impl.plugin_name}: {event} takes exactly one argument and cannot be a wrapper")
        bound.append((impl.plugin_name, impl.function))
    return tuple(bound)


def import_target(provided: Provided, path: str) -> Any:
    """Import "package.module:Name" of a component. Raises PluginError naming plugin, wheel and cause."""
    module, _, attribute = path.partition(":")
    plugin = provided.plugin
    who = f"{provided.group}={provided.component.name} (plugin {plugin.name}, {plugin.distribution} {plugin.version})"
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise PluginError(f"{who}: cannot import {path!r}: {type(error).__name__}: {error}") from error
