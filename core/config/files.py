"""The YAML files that a config is composed from: ours, those of plugins, a folder of one's own. Imports no torch.

The one file that knows Hydra's insides: its search path, its defaults list and its overrides are used as they are, without
its global state, and what a composition was made of is kept, so that each value can be traced to its file.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins as HydraPlugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from core.components import CHAINS, GROUPS
from core.config.bounds import check_bounds
from core.errors import ConfigError, near_matches
from core.plugins import Plugins
from core.version import nonet_version

ROOT = "engine"
FREE_GROUPS = ("preset", "experiment")
CONFIG_DIR = "config_dir="  # the word that adds a folder of one's own
OURS = "configs"  # the package of our own files
COMPONENT = "component"  # provider of an option that no file describes


class _Repository(CachingConfigRepository):
    """Hydra's files, and an option for each component that has none of its own: selected by name all the same."""

    def __init__(self, delegate: IConfigRepository, plugins: Plugins, places: Sequence[Path]):
        super().__init__(delegate)
        self._places = places
        self._names = {group: plugins.names(group) for group in (*GROUPS, *CHAINS)}

    def group_exists(self, config_path: str) -> bool:
        return config_path in (*GROUPS, *CHAINS, *FREE_GROUPS)

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        found = super().get_group_options(group_name, results_filter)
        return sorted({*found, *self._names.get(group_name, ())})

    def load_config(self, config_path: str) -> ConfigResult | None:
        if f"config_path={config_path}" not in self.cache:
            self._check_bounds(config_path)
        try:
            found = super().load_config(config_path)
        except ValueError as error:
            raise ValueError(f"In '{config_path}': {error}" if config_path not in str(error) else str(error)) from error
        group, _, name = config_path.partition("/")
        if found is None and name in self._names.get(group, ()):
            content: dict[str, object] = {name: {}} if group in CHAINS else {"name": name}
            node = OmegaConf.create(content)
            found = ConfigResult(COMPONENT, COMPONENT, node, {"package": None}, defaults_list=[])
            self.cache[f"config_path={config_path}"] = found
        return found

    def _check_bounds(self, config_path: str) -> None:
        """Of the file that Hydra is about to read: it would build whatever aliases stand for."""
        files = (place / f"{config_path}.yaml" for place in self._places)
        if (file := next((file for file in files if file.is_file()), None)) is not None:
            check_bounds(file)


@dataclass(frozen=True, slots=True)
class Composition:
    """What Hydra made, and of what: `defaults` lists the files in the order in which they were merged."""

    config: DictConfig
    defaults: DefaultsList


class ConfigFiles:
    """The search path: `configs`, then the packages of plugins, then `folders` (as typed -> place)."""

    def __init__(self, plugins: Plugins, folders: Mapping[str, Path]):
        HydraPlugins.instance()  # registers pkg:// and file://
        version.setbase("1.3")
        path = ConfigSearchPathImpl()
        path.append(OURS, f"pkg://{OURS}")
        for package in plugins.config_packages():
            path.append(package, f"pkg://{package}")
        for typed, folder in folders.items():
            path.append(f"{CONFIG_DIR}{typed}", f"file://{folder}")
        path.append("schema", "structured://")
        self._version = nonet_version()
        self._wheels = {p: r.wheel for r in plugins.records for p in r.config_packages}
        self._loader = ConfigLoaderImpl(path)
        places = [place for package in (OURS, *plugins.config_packages()) for place in _places(package)]
        self._repository = _Repository(self._loader.repository, plugins, [*places, *folders.values()])

    def options(self, group: str) -> list[str]:
        return self._repository.get_group_options(group)

    def load(self, config_path: str) -> ConfigResult | None:
        """One file, read once."""
        return self._repository.load_config(config_path)

    def compose(self, overrides: Sequence[Override], added: Mapping[str, Sequence[str]]) -> Composition:
        """Merge the files and apply `overrides`; `added` are options that join those of a chain. Raises ConfigError."""
        try:
            defaults = self._defaults(overrides, added)
            _refuse_twice(defaults)
            self._refuse_lists(defaults)
            config = self._loader._compose_config_from_defaults_list(defaults.defaults, self._repository)
            OmegaConf.set_struct(config, True)
            self._loader._apply_overrides_to_config(defaults.config_overrides, config)
            return Composition(config, defaults)
        except YAMLError as error:
            raise ConfigError(f"a config file is not YAML: {one_line(error)}") from None
        except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
            if found := re.search(r"Could not delete from config\. '([^']+)'", str(error)):
                raise ConfigError(f"~{found[1]}: nothing sets {found[1]}", found[1], unknown=True) from None
            raise ConfigError(one_line(error) + self._hint(str(error))) from None

    def _defaults(self, overrides: Sequence[Override], added: Mapping[str, Sequence[str]]) -> DefaultsList:
        root = self.load(ROOT)
        assert root is not None and root.defaults_list is not None
        kept = list(root.defaults_list)
        root.defaults_list += [ConfigDefault(path=f"{chain}/{o}") for chain, names in added.items() for o in names]
        try:
            return create_defaults_list(self._repository, ROOT, list(overrides), False, False)
        finally:
            root.defaults_list = kept

    def _refuse_lists(self, defaults: DefaultsList) -> None:
        """A list in the place of a mapping, which OmegaConf refuses without naming the key."""
        for default in defaults.defaults:
            path = str(default.config_path)
            loaded = self.load(path)
            config = loaded.config if loaded is not None else None
            if not isinstance(config, DictConfig):
                raise ConfigError(f"a config file holds keys, as in `scheduler:`, and no list: {self.where(path)}")
            for key in map(str, config if default.package == "" else ()):
                if isinstance(config._get_node(key), ListConfig):
                    raise ConfigError(
                        f"config key {key!r}: it holds keys of its own, and no list{_selects(key)} "
                        f"(set in {self.where(path)})",
                        key,
                    )

    def where(self, config_path: str) -> str:
        """The file, for people, with the wheel that ships it."""
        loaded = self.load(config_path)
        provider = loaded.provider if loaded is not None else COMPONENT
        if provider == OURS:
            return f"{OURS}/{config_path}.yaml (nonet {self._version})"
        if provider.startswith(CONFIG_DIR):
            return f"{provider.removeprefix(CONFIG_DIR).rstrip('/')}/{config_path}.yaml (config_dir)"
        return f"{provider}:{config_path}.yaml ({self._wheels[provider]})" if provider in self._wheels else provider

    def _asked_in(self, group: str, option: str) -> str:
        """The file whose `- override /group: option` it was: Hydra names the file that is overridden."""
        for key, loaded in self._repository.cache.items():
            for default in (loaded.defaults_list if loaded is not None else None) or []:
                if isinstance(default, GroupDefault) and default.override and str(default.group).lstrip("/") == group:
                    value = default.value
                    if option == value or (isinstance(value, list) and option in value):
                        return f" (set in {self.where(key.removeprefix('config_path='))})"
        return ""

    def _hint(self, message: str) -> str:
        """What Hydra's words about a defaults list lead to: near matches of the option or the group, or how to override."""
        if found := re.search(r"Could not (?:find|load) '(\w+)/([^'/]+)'", message):
            return near_matches(found[2], self.options(found[1])) + self._asked_in(found[1], found[2])
        if found := re.search(r"Could not override '([^']+)'", message):
            word = found[1].split("@")[0].rpartition("/")[2]
            if word in FREE_GROUPS:
                return f"; a file takes in another one as `- /{word}/<name>`"
            if word in (*GROUPS, *CHAINS):
                return f"; in a file, write `- override /{word}: …`, with the slash"
            return near_matches(word, (*GROUPS, *CHAINS))
        if found := re.search(r"Multiple values for (\w+)", message):
            several = f"; several are written +{found[1]}=[a,b]" if found[1] in FREE_GROUPS else ""
            return f"; in a file, write `- override /{found[1]}: …`{several}"
        return ""


def _places(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def _selects(key: str) -> str:
    return f"; a file selects in its defaults: `- override /{key}: …`" if key in (*GROUPS, *CHAINS) else ""


def _refuse_twice(defaults: DefaultsList) -> None:
    """Where the command line lists a chain, what files add to it counts for nothing, and may come again."""
    paths = [str(default.config_path) for default in defaults.defaults if not default.is_self]
    metadata = defaults.overrides.override_metadata
    for path in paths:
        chain, _, option = path.partition("/")
        listed = chain in metadata and metadata[chain].external_override
        if chain in CHAINS and not listed and paths.count(path) > 1:
            raise ConfigError(
                f"{chain}: {option!r} is selected twice; name it once (a file adds as `- /{path}`)", chain
            )


def one_line(error: Exception) -> str:
    """An error of Hydra or OmegaConf without its appendix of search paths and options."""
    text = re.split(r"\n\s*(?:Config search path:|Available options in )", str(error))[0]
    text = re.sub(r" full_key: .*$", "", " ".join(text.split()))
    key = getattr(error, "full_key", None)
    return f"config key {key!r}: {text}" if key else text.rstrip(".")
