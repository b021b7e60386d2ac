"""A config from groups, chains, presets and overrides, with the place each value came from. Imports no torch.

Which options exist is asked of the search path: our `configs`, then the config packages of plugins, then folders of one's own.
A component without a YAML file can be selected by name all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from core.components import CHAINS, GROUPS
from core.config.files import CONFIG_DIR, FREE_GROUPS, Composition, ConfigFiles, one_line
from core.config.keys import keys_of, nearest
from core.config.overrides import KEYS, ROOTS, Changes, changes, is_known, parsed
from core.config.provenance import OVERRIDE, Provenance, members_of, trace
from core.errors import ConfigError, PluginError, near_matches
from core.other_names import unknown_component
from core.plugins import Plugins
from core.settings import SECTIONS, ModelSettings, settings_class


@dataclass(frozen=True)
class ComposedConfig:
    """`values` are plain, resolved and nested as in YAML; names of groups, chains and members are known, keys are not checked."""

    values: Mapping[str, Any]
    _composition: Composition = field(repr=False)
    _files: ConfigFiles = field(repr=False)
    _changes: Changes = field(repr=False)
    _plugins: Plugins = field(repr=False)

    @cached_property
    def provenance(self) -> Provenance:
        return trace(self._composition, self._files, self._changes)

    def known_keys(self) -> list[str]:
        return known_keys(self.values, self._plugins)

    @contextmanager
    def naming_files(self) -> Iterator[None]:
        """A ConfigError about a key goes on with the file that set it, and with the same key elsewhere where it is unknown."""
        try:
            yield
        except ConfigError as error:
            more = self._elsewhere(error) + self._set_in(error)
            if not more:
                raise
            raise ConfigError(f"{error}{more}", error.key, unknown=error.unknown) from None

    def _set_in(self, error: ConfigError) -> str:
        origin = self.provenance.of(error.key) if error.key else ""
        return f" (set in {origin})" if origin not in ("", OVERRIDE) else ""

    def _elsewhere(self, error: ConfigError) -> str:
        """`generate schedulr=fcfs` is taken for a field of the request, and so for a key of the frontend."""
        if not error.unknown:
            return ""
        place, _, word = error.key.rpartition(".")
        near = nearest(word, [*ROOTS, *self.known_keys()], cutoff=0.85)
        here = any(key.rpartition(".")[0] == place for key in near)
        return f"; there is {', '.join(near)}" if near and not here else ""


def compose(overrides: Sequence[str], plugins: Plugins) -> ComposedConfig:
    """Compose `configs/engine.yaml` with `overrides`; `config_dir=FOLDER` among them adds a folder of one's own YAML.

    Raises ConfigError naming the key or group and near matches.
    """
    folders = {text.removeprefix(CONFIG_DIR): _folder(text) for text in overrides if text.startswith(CONFIG_DIR)}
    files = ConfigFiles(plugins, folders)
    words = parsed([text for text in overrides if not text.startswith(CONFIG_DIR)])
    unknown = [word for word in words if not is_known(word)]
    if unknown:
        known = [word for word in words if is_known(word)]
        key = str(unknown[0].get_key_element()).lstrip("+~")
        raise ConfigError(f"unknown config key {key!r}{_near_root(key, _keys_beside(known, files, plugins))}", key)
    try:
        return _composed(changes(words, files, plugins), files, plugins)
    except ConfigError as error:
        if not error.unknown:  # only of `~key`: other keys are checked by the settings they belong to
            raise
        known = [word for word in words if not word.is_delete()]
        raise ConfigError(f"{error}{_near_root(error.key, _keys_beside(known, files, plugins))}", error.key) from None


def _composed(changed: Changes, files: ConfigFiles, plugins: Plugins) -> ComposedConfig:
    composition = files.compose(changed.overrides, changed.added)
    composed = ComposedConfig(_plain(composition, resolve=False), composition, files, changed, plugins)
    with composed.naming_files():
        _refuse_resolvers(composed.values)
        values = _plain(composition, resolve=True)
        _check_names(replace(composed, values=values), plugins)
    for chain in CHAINS:
        if isinstance(values.get(chain), dict):
            values[chain] = _selected(chain, values[chain], files, changed)
    return replace(composed, values=values)


def _plain(composition: Composition, resolve: bool) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(composition.config, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error), getattr(error, "full_key", None) or "") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _selected(chain: str, members: Mapping[str, Any], files: ConfigFiles, changed: Changes) -> dict[str, Any]:
    """A list on the command line is all there is, whatever members files set values of; what `+chain=` adds comes last."""
    last = [m for option in changed.added.get(chain, ()) for m in members_of(files, chain, option)]
    if chain in changed.listed:
        kept = {m for option in changed.listed[chain] for m in members_of(files, chain, option)}
        members = {name: v for name, v in members.items() if name in {*kept, *last, *changed.members(chain)}}
    names = [*(name for name in members if name not in last), *(name for name in last if name in members)]
    return {str(name): members[name] for name in names}


def _check_names(composed: ComposedConfig, plugins: Plugins) -> None:
    """Top-level keys, and the names of components. Raises ConfigError with near matches."""
    for key in composed.values:
        if key in FREE_GROUPS:
            raise ConfigError(
                f"a {key} file must begin with the line `# @package _global_`; without it its keys go nowhere", key
            )
        if key not in KEYS:
            raise ConfigError(f"unknown config key {key!r}{_near_root(key, composed.known_keys())}", key)
    for group in (*GROUPS, *CHAINS):
        section = composed.values.get(group)
        for key, name in _names(group, section if isinstance(section, dict) else {}):
            if name not in plugins.names(group):
                said = unknown_component(group, name, plugins.names(group))
                raise ConfigError(f"config key {key!r}: {said}{plugins.failures()}", key)


def _names(group: str, section: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """(config key, name) of what a group or chain selects."""
    if group in CHAINS:
        return [(f"{group}.{name}", str(name)) for name in section]
    return [(f"{group}.name", str(section["name"]))] if "name" in section else []


def _keys_beside(others: Sequence[Override], files: ConfigFiles, plugins: Plugins) -> list[str]:
    """The keys that a wrong one may have meant: the other words say which components are asked for theirs."""
    try:
        return _composed(changes(others, files, plugins), files, plugins).known_keys()
    except ConfigError:
        return _composed(changes((), files, plugins), files, plugins).known_keys()


def _near_root(word: str, keys: Sequence[str]) -> str:
    if word.startswith("_"):
        return "; the first line of a preset is `# @package _global_`"
    near = nearest(word, [*ROOTS, CONFIG_DIR[:-1], *keys])
    return f"; did you mean {', '.join(near)}?" if near else near_matches(word, ROOTS)


def known_keys(values: Mapping[str, Any], plugins: Plugins) -> list[str]:
    """Every full key that the selected components and sections know: frontend.limits.connections, observers.jsonl.path …"""
    sections: dict[str, type[BaseModel]] = {"model": ModelSettings, **SECTIONS}
    keys = [f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)]
    for group in (*GROUPS, *CHAINS):
        section = values.get(group)
        for path, name in _names(group, section if isinstance(section, Mapping) else {}):
            path = path if group in CHAINS else group
            try:
                keys += [path, *(f"{path}.{key}" for key in keys_of(settings_class(plugins.find(group, name))))]
            except PluginError:
                continue  # its keys are not known, and this is only a hint
    return list(dict.fromkeys(keys))


def values_named(overrides: Sequence[str], section: str) -> dict[str, Any]:
    """What `section.key=value` on the command line says, for what is needed before a config is composed.

    References to other keys, which only a composed config can resolve, are left out.
    """
    named = [text for text in overrides if text.lstrip("+").startswith(f"{section}.") and "${" not in text]
    return {word.key_or_group.removeprefix(f"{section}."): word.value() for word in parsed(named)}


def _folder(override: str) -> Path:
    folder = Path(override.removeprefix(CONFIG_DIR)).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{override}: no such folder; name one that holds groups, such as preset/mine.yaml")
    return folder


def _refuse_resolvers(node: object, path: str = "") -> None:
    """`${oc.env:…}` and other resolvers would let a config read the environment or run code; plain references are fine."""
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_resolvers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _refuse_resolvers(value, f"{path}[{index}]")
    elif isinstance(node, str) and re.search(r"\$\{[^}]*:", node):
        raise ConfigError(
            f"{path}: the resolver in {node!r} is not allowed; write the value, or a plain ${{key}} reference", path
        )
