"""Which suites check what: the plugins and components of a subject as test classes, made from what config composes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.components import PluginRecord, Provided, import_target
from core.contracts import CONTRACTS
from core.errors import NonetError
from core.plugins import Plugins, load_plugins
from core.testing.conformance import Subject
from core.testing.import_probe import others_than, record_of
from core.testing.plugin import PluginContract
from core.testing.selection import selected_values

OPTIONAL: Mapping[tuple[str, str], str] = {
    ("cache", "prefix_sharing"): "core.testing.cache:PrefixSharingContract",
    ("cache", "swap"): "core.testing.swap:SwapContract",
    ("cache", "window_groups"): "core.testing.window_groups:WindowGroupsContract",
}
"""(group, word that a component provides) -> a further suite."""

STAND_INS: Mapping[str, tuple[str, ...]] = {
    "frontend=openai_http": ("frontend.port=0",),
    "frontend=offline": ("frontend.prompt=hello",),
}
"""Values without which a built-in cannot be checked."""


def suites_of(subject: Subject) -> dict[str, type]:
    """Test classes by name, for the namespace of a test module. `subject` of each names what it checks."""
    found: dict[str, type] = {}
    for plugin in subject.plugins:
        plugins = load_plugins(others_than(plugin))
        record = record_of(plugins, plugin)
        provided = [one for one in _provided(record) if subject.chooses(one)]
        found[_class_name("plugin", plugin)] = _package(plugin, subject)
        for one in provided:
            found |= _component(one, plugins, subject)
    return found


def words_of(group: str, name: str) -> frozenset[str]:
    """What a built-in component provides, for a test class of ours."""
    return frozenset(load_plugins(("all",)).find(group, name).component.provides)


def _provided(record: PluginRecord) -> list[Provided]:
    return [Provided(group, component, record) for group, component in record.components]


def _package(plugin: str, subject: Subject) -> type:
    words = {"plugin": plugin, "overrides": subject.overrides, "subject": f"plugin {plugin}"}
    return type("Test", (PluginContract,), words)


def _component(one: Provided, plugins: Plugins, subject: Subject) -> dict[str, type]:
    """Nothing where it cannot be imported or selected: `PluginContract` says so."""
    overrides = (*STAND_INS.get(_who(one), ()), *subject.overrides)
    try:
        cls = import_target(one, one.component.target)
        _, values = selected_values(one.group, one.component.name, plugins, overrides)
    except NonetError:
        return {}
    words = {
        "component": cls,
        "settings": values,
        "provides": frozenset(one.component.provides),
        "subject": _who(one),
        **_of_group(one, subject),
    }
    optional = [
        path for (group, word), path in OPTIONAL.items() if group == one.group and word in one.component.provides
    ]
    suites = [CONTRACTS[one.group].suite, *optional]
    return {_class_name(one.group, one.component.name, path): _suite(path, words) for path in suites}


def _of_group(one: Provided, subject: Subject) -> dict[str, Any]:
    if one.group == "logits_processors":
        params = None if one.component.params is None else import_target(one, one.component.params)
        return {"params": params}
    if one.group == "model" and subject.model:
        return {"folder": Path(subject.model)}
    return {}


def _suite(path: str, words: Mapping[str, Any]) -> type:
    module, _, name = path.partition(":")
    return type("Test", (getattr(importlib.import_module(module), name),), dict(words))


def _who(one: Provided) -> str:
    return f"{one.group}={one.component.name}"


def _class_name(*words: str) -> str:
    """`Test` and the words, as an identifier."""
    return "Test_" + "_".join("".join(letter if letter.isalnum() else "_" for letter in word) for word in words)
