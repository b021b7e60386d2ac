"""Hydra's part: compose a config from groups, presets and overrides, and remember where each value came from.

Which options exist is asked of Hydra's search path: our `configs`, then the config packages of plugins. A component
without a YAML file can be selected by name all the same. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins as HydraPlugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from core.errors import ConfigError, near_matches
from core.hookspecs import GROUPS
from core.plugins import Plugins

ROOT = "engine"
FREE_GROUPS = ("preset", "experiment")
SECTIONS = ("plugins", "process")
CONFIG_DIR = "config_dir="


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    values: Mapping[str, Any]
    origins: Mapping[str, str]  # dotted key -> "override", or the YAML file that set it last


class _MoreConfigs(SearchPathPlugin):
    """Appends what plugins and the user bring; Hydra builds it without arguments, so a subclass carries the places."""

    places: tuple[tuple[str, str], ...] = ()  # (provider, path)

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, path in self.places:
            search_path.append(provider=provider, path=path)


@contextmanager
def _hydra(plugins: Plugins, config_dirs: Sequence[Path]) -> Iterator[None]:
    known = HydraPlugins.instance()
    packages = [(package, f"pkg://{package}") for package in plugins.config_packages()]
    folders = [(str(folder), f"file://{folder}") for folder in config_dirs]
    cls = type("MoreConfigs", (_MoreConfigs,), {"places": (*packages, *folders)})
    known.register(cls)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            _add_missing_options(plugins)
            yield
    finally:
        known.class_name_to_class.pop(f"{cls.__module__}.{cls.__qualname__}", None)
        for registered in known.plugin_type_to_subclass_list.values():
            if cls in registered:
                registered.remove(cls)


def _add_missing_options(plugins: Plugins) -> None:
    store = ConfigStore.instance()
    for group in GROUPS:
        have = set(options(group))
        for name in plugins.names(group):
            if name not in have:
                store.store(group=group, name=name, node={"name": name}, provider="component")


def options(group: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, ObjectType.CONFIG))


def compose(overrides: Sequence[str], plugins: Plugins) -> ComposedConfig:
    """Compose `configs/engine.yaml` with `overrides`; `config_dir=FOLDER` among them adds a folder of one's own YAML.

    Raises ConfigError naming the key or group and near matches.
    """
    folders = [_config_dir(text) for text in overrides if text.startswith(CONFIG_DIR)]
    with _hydra(plugins, folders):
        parsed = _parsed([text for text in overrides if not text.startswith(CONFIG_DIR)])
        checked = [_checked(override, plugins) for override in parsed]
        try:
            config = hydra_compose(ROOT, overrides=checked)
            values = OmegaConf.to_container(config, resolve=False)
            _refuse_resolvers(values)
            values = OmegaConf.to_container(config, resolve=True)
            assert isinstance(values, dict)
            _refuse_misplaced(values)
            return ComposedConfig({str(k): v for k, v in values.items()}, _origins(checked))
        except YAMLError as error:
            raise ConfigError(f"a config file is not YAML: {_one_line(error)}") from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(error) + _hint(str(error))) from None


def _refuse_misplaced(values: Mapping[Any, Any]) -> None:
    for group in FREE_GROUPS:
        if group in values:
            raise ConfigError(
                f"a {group} file must begin with the line `# @package _global_`; without it its keys go nowhere"
            )


def _hint(message: str) -> str:
    """What Hydra's words about a defaults list lead to: near matches of the option or the group, or how to override."""
    if found := re.search(r"Could not find '(\w+)/([^']+)'", message):
        return near_matches(found[2], options(found[1]))
    if found := re.search(r"Could not override '([^']+)'", message):
        return near_matches(found[1].lstrip("/"), GROUPS)
    if found := re.search(r"Multiple values for (\w+)", message):
        several = f"; several are written +{found[1]}=[a,b]" if found[1] in FREE_GROUPS else ""
        return f"; in a file, write `- override /{found[1]}: …`{several}"
    return ""


def disabled_by(overrides: Sequence[str]) -> tuple[str, ...]:
    """What `plugins.disable=[…]` on the command line names: needed before plugins are loaded, so before composing."""
    named = [o for o in overrides if o.lstrip("+").startswith("plugins.disable=")]
    values = [override.value() for override in _parsed(named)]
    return tuple(str(name) for value in values for name in (value if isinstance(value, list) else [value]))


def _config_dir(override: str) -> Path:
    folder = Path(override.removeprefix(CONFIG_DIR)).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{override}: no such folder; name one that holds groups, such as preset/mine.yaml")
    return folder


def _one_line(error: Exception) -> str:
    text = re.sub(r" full_key: .*$", "", " ".join(str(error).split()))
    key = getattr(error, "full_key", None)
    return f"config key {key!r}: {text}" if key else text


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        if text.startswith("-") or ("=" not in text and not text.startswith("~")):
            raise ConfigError(
                f"cannot read the override {text!r}: write key=value, as in frontend.port=8123 or +preset=chat"
            )
        try:
            parsed += parser.parse_overrides([_with_quoted_source(text)])
        except HydraException as error:
            raise ConfigError(
                f"cannot read the override {text!r}: {_one_line(error)}; quote values with special characters"
            ) from None
    return parsed


def _with_quoted_source(text: str) -> str:
    """`pypi:name==1.2` and `~/x` are no values in Hydra's grammar, and a shell takes away the quotes that make them some."""
    return re.sub(r"^(\+{0,2}model\.source)=([^'\"\\]+)$", r"\1='\2'", text)


def _checked(override: Override, plugins: Plugins) -> str:
    """The override as Hydra wants it: known roots and options only, and `group.key=…` allowed though no YAML lists the key."""
    key, line = override.key_or_group, override.input_line or ""
    root, dot, _ = key.partition(".")
    known = (*GROUPS, *FREE_GROUPS, *SECTIONS)
    if root.split("/")[0].split("@")[0] not in known:
        raise ConfigError(f"unknown config key {key!r}{near_matches(root, known)}")
    if dot:
        return line if override.is_delete() or line.startswith("+") else f"++{line}"
    if root in (*GROUPS, *FREE_GROUPS):
        return _checked_option(override, root, line, plugins)
    raise ConfigError(f"{key} is a section; set one key of it, as in {key}.<key>=<value>")


def _checked_option(override: Override, group: str, line: str, plugins: Plugins) -> str:
    choice = override.value()
    if not override.is_delete() and not isinstance(choice, str | list):
        raise ConfigError(f"{group}={choice!r} selects nothing; choose one of: {', '.join(options(group))}")
    for name in [choice] if isinstance(choice, str) else choice if isinstance(choice, list) else []:
        if name not in options(group):
            hint = near_matches(str(name), options(group)) + plugins.failures()
            raise ConfigError(f"no {group} is called {name!r}{hint}")
    if group in FREE_GROUPS and not line.startswith("+"):
        return f"+{line}"
    return line[1:] if group in GROUPS and line.startswith("+") else line


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
            f"{path}: the resolver in {node!r} is not allowed; write the value, or a plain ${{key}} reference"
        )


def _origins(overrides: Sequence[str]) -> dict[str, str]:
    """Replay the defaults list: the last file, or override, that sets a leaf is where its value came from."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    defaults, repository = loader.compute_defaults_list(ROOT, list(overrides), RunMode.RUN), loader.repository
    origins: dict[str, str] = {}
    for default in defaults.defaults:
        loaded = repository.load_config(default.config_path) if default.config_path else None
        if loaded is None or str(default.config_path).startswith("hydra/"):
            continue
        package = default.package or ""
        for leaf in _leaves(OmegaConf.to_container(loaded.config, resolve=False)):
            origins[f"{package}.{leaf}" if package else leaf] = f"{loaded.provider}:{default.config_path}.yaml"
    for override in _parsed(overrides):
        if "." in override.key_or_group:
            origins[override.key_or_group] = "override"
        elif override.key_or_group in GROUPS:
            origins[f"{override.key_or_group}.name"] = "override"
    return origins


def _leaves(node: object, path: str = "") -> Iterator[str]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path
