"""Plugins that no wheel brings: an entry point of one's own making, for tests of how plugins are loaded."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from core.components import PluginRecord
from core.hookspecs import API_VERSION, Component, hookimpl
from core.plugins import Plugins


class FakeDistribution:
    """The wheel that an entry point is of."""

    def __init__(self, name: str, version: str = "1.2", requires: tuple[str, ...] = ()):
        self.metadata = {"Name": name}
        self.version = version
        self.requires = list(requires)


class FakePoint:
    """An `importlib.metadata.EntryPoint` of a wheel that is not installed.

    `plugin` is what importing gives; an exception is raised instead, and a function is called for it.
    """

    def __init__(self, name: str, plugin: object, dist: str = "acme-plugins", requires: tuple[str, ...] = ()):
        self.name, self.value, self._plugin = name, f"acme_{name}.plugin", plugin
        self.dist = FakeDistribution(dist, requires=requires)

    def load(self) -> object:
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin() if isinstance(self._plugin, types.FunctionType) else self._plugin


def plugin_with(api: object = API_VERSION, **hooks: Callable[..., Any]) -> Any:
    """A module called `acme` with these hooks; `api=None`: one that does not say what it was written for."""
    module: Any = types.ModuleType("acme")
    if api is not None:
        module.NONET_API = api
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


def lottery() -> list[Component]:
    """For `provide_schedulers=lottery`."""
    return [Component("lottery", "acme.lottery:Lottery", "tickets")]


def record_of(plugins: Plugins, name: str) -> PluginRecord:
    (record,) = [record for record in plugins.records if record.name == name]
    return record
