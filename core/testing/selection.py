"""What config composes for a component that is checked, and values on the command line that no component takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.components import CHAINS, Provided
from core.config.compose import compose
from core.config.files import CONFIG_DIR
from core.config.keys import Option, validated
from core.config.overrides import ROOTS
from core.errors import ConfigError, NonetError, near_matches
from core.plugins import Plugins, load_plugins
from core.settings import Settings, settings_class
from core.testing.conformance import Subject
from core.testing.import_probe import others_than, record_of


def selected_values(
    group: str, option: str, plugins: Plugins, overrides: tuple[str, ...] = ()
) -> tuple[str, dict[str, Any]]:
    """Name of the component that an option selects, and its values as config composes them, checked against its settings.

    Of `overrides`, those of the group (in a chain, of the option) count, and folders of config. Raises ConfigError or
    PluginError.
    """
    path = f"{group}.{option}" if group in CHAINS else group
    selecting = f"{group}=[{option}]" if group in CHAINS else f"{group}={option}"
    own = [text for text in overrides if text.lstrip("+~").startswith((f"{path}.", CONFIG_DIR))]
    settings = Settings.from_config(compose([selecting, *own], plugins).values)
    chosen = settings.chains[group][-1] if group in CHAINS else settings.groups[group]
    path = f"{group}.{chosen.name}" if group in CHAINS else group
    named = None if group in CHAINS else Option(group, chosen.name)
    validated(settings_class(plugins.find(group, chosen.name)), chosen.values, path, option=named)
    return chosen.name, chosen.values


def unusable_override(subject: Subject) -> str | None:
    """Why a value of `--set` is of no component that is checked, with near matches; None where each is of one."""
    for text in subject.overrides:
        if not text.startswith(CONFIG_DIR) and (problem := _problem(text, subject)):
            return f"--set {text}: {problem}"
    return None


def _problem(text: str, subject: Subject) -> str | None:
    """A key that one of its group's components takes is good: with `--builtins` others of the group may not know it."""
    key = text.lstrip("+~").partition("=")[0]
    group, dot, rest = key.partition(".")
    if group not in ROOTS:
        return f"unknown config key {key!r}{near_matches(group, ROOTS)}"
    if not dot:
        return "it takes values of what is checked, as in --set scheduler.max_num_running_reqs=8"
    name = rest.partition(".")[0] if group in CHAINS else ""
    problems: list[str] = []
    for one, plugins in _chosen(subject):
        if one.group == group and name in ("", one.component.name):
            try:
                selected_values(group, one.component.name, plugins, (*_folders(subject), text))
                return None
            except ConfigError as error:
                if not error.unknown:
                    return None  # a wrong value, which is a failed check of the component
                problems.append(str(error))
            except NonetError:
                return None
    return problems[0] if problems else f"nothing that is checked is of {group}{f'={name}' if name else ''}"


def _chosen(subject: Subject) -> Iterator[tuple[Provided, Plugins]]:
    for plugin in subject.plugins:
        plugins = load_plugins(others_than(plugin))
        record = record_of(plugins, plugin)
        for group, component in record.components:
            one = Provided(group, component, record)
            if subject.chooses(one):
                yield one, plugins


def _folders(subject: Subject) -> tuple[str, ...]:
    return tuple(text for text in subject.overrides if text.startswith(CONFIG_DIR))
