"""What every plugin package must be, as tests, whatever it provides::

class TestPackage(PluginContract):
    plugin = "lottery"  # name of its entry point
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from core.capabilities import malformed, unknown_words
from core.components import CHAINS, GROUPS, PluginRecord, Provided, import_target
from core.config.compose import compose
from core.config.files import FREE_GROUPS
from core.contracts import CONTRACTS
from core.errors import NonetError, near_matches
from core.hookspecs import API_VERSION
from core.loading.api import LITERAL, check_api, declared_literal
from core.plugins import ENTRY_POINT_GROUP, Plugins, load_plugins
from core.settings import settings_class
from core.testing.import_probe import others_than, record_of
from core.testing.selection import selected_values

OURS = frozenset({"core", "plugins", "configs"})
PROBE_S = 60.0
MAX_SUMMARY = 120  # characters


OPTIONAL = "Optional (API"
"""In the docstring of a method that a component may leave out."""


class PluginContract:
    plugin: ClassVar[str]
    overrides: ClassVar[tuple[str, ...]] = ()
    """Config values, as on the command line, for components that cannot be selected without: scheduler.tickets=3."""

    @pytest.fixture(scope="class")
    @classmethod
    def plugins(cls) -> Plugins:
        return load_plugins(others_than(cls.plugin))

    @pytest.fixture(scope="class")
    @classmethod
    def probe(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """What a process of its own saw when it listed the plugin."""
        folder = str(tmp_path_factory.mktemp("probe"))
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environ = {**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "core.testing.import_probe", cls.plugin]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"the process that lists it ends with {done.returncode}: {done.stderr[-300:]}"
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    @pytest.fixture
    def record(self, plugins: Plugins) -> PluginRecord:
        return record_of(plugins, self.plugin)

    @pytest.fixture
    def provided(self, record: PluginRecord) -> list[Provided]:
        return [Provided(group, component, record) for group, component in record.components]

    def classes(self, provided: list[Provided]) -> Iterator[tuple[str, Provided, type]]:
        """Those that can be imported; another check says which cannot."""
        for one in provided:
            try:
                yield f"{one.group}={one.component.name}", one, import_target(one, one.component.target)
            except NonetError:
                continue

    def module(self) -> str:
        """That holds the hooks."""
        points = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        return points.get(self.plugin, self.plugin).partition(":")[0]

    def test_it_loads(self, record: PluginRecord) -> None:
        assert record.status == "loaded", record.reason

    def test_it_provides_something(self, record: PluginRecord) -> None:
        assert record.status != "loaded" or record.hooks, "it implements no hook"

    def test_every_hook_is_called(self, probe: dict[str, Any]) -> None:
        unmarked = [warning for warning in probe["warnings"] if "@hookimpl" in warning]
        assert not unmarked, unmarked[0]

    def test_the_api_version_is_a_literal_that_loads_here(self, record: PluginRecord) -> None:
        if record.builtin:
            assert getattr(importlib.import_module(self.plugin), LITERAL) == API_VERSION
            return
        declared = declared_literal(self.module())
        assert declared is not None, (
            f"its module has no line {LITERAL} = {API_VERSION!r} that can be read without running it"
        )
        check_api(declared, record.distribution)

    def test_listing_it_imports_nothing_heavy(self, probe: dict[str, Any]) -> None:
        assert not probe["listing"], (
            f"listing it imports {probe['listing'][0]}; keep that to the modules that targets name"
        )

    def test_settings_and_params_are_in_light_modules(self, probe: dict[str, Any]) -> None:
        more = [name for name in probe["settings"] if name not in probe["listing"]]
        assert not more, f"the module of `settings` or `params` imports {more[0]}; config is checked without it"

    def test_importing_it_changes_nothing_else(self, probe: dict[str, Any]) -> None:
        assert not probe["changed"], f"importing it {probe['changed'][0]}"

    def test_each_component_can_be_imported(self, provided: list[Provided]) -> None:
        for one in provided:
            found = import_target(one, one.component.target)
            assert inspect.isclass(found), f"{one.component.target} is no class"

    def test_each_component_says_in_a_line_what_it_is(self, provided: list[Provided]) -> None:
        for one in provided:
            summary = one.component.summary
            good = summary.strip() and summary.isprintable() and len(summary) <= MAX_SUMMARY
            assert good, f"{one.group}={one.component.name}: summary={summary!r} is not one line of words"

    def test_settings_are_frozen_and_refuse_unknown_keys(self, provided: list[Provided]) -> None:
        for who, one, cls in self.classes(provided):
            assert isinstance(getattr(cls, "Settings", None), type), f"{who} has no nested class Settings"
            for settings in (cls.Settings, settings_class(one)):  # type: ignore[attr-defined]
                assert issubclass(settings, BaseModel), f"{who}: Settings is no pydantic model"
                assert settings.model_config.get("frozen"), f"{who}: Settings is not frozen"
                assert settings.model_config.get("extra") == "forbid", f"{who}: Settings takes unknown keys"

    def test_settings_are_the_same_in_both_places(self, provided: list[Provided]) -> None:
        """`Component.settings` names the class that is `Settings` of the component, not another like it."""
        for who, one, cls in self.classes(provided):
            if one.component.settings is not None:
                named = import_target(one, one.component.settings)
                assert named is getattr(cls, "Settings", None), (
                    f"{who}: {one.component.settings} is not {cls.__name__}.Settings"
                )

    def test_each_component_is_made_of_settings_and_context(self, provided: list[Provided]) -> None:
        for who, _, cls in self.classes(provided):
            try:
                inspect.signature(cls).bind(object(), object())
            except TypeError as error:
                raise AssertionError(f"{who}: {cls.__name__}(settings, context) cannot be called: {error}") from error

    def test_each_component_has_the_methods_of_its_contract(self, provided: list[Provided]) -> None:
        for who, one, cls in self.classes(provided):
            protocol = CONTRACTS[one.group].protocol
            module, _, name = protocol.partition(":")
            contract = vars(getattr(importlib.import_module(module), name))
            methods = {name: value for name, value in contract.items() if inspect.isfunction(value) and name[0] != "_"}
            wanted = [
                name for name, value in methods.items() if OPTIONAL not in " ".join((value.__doc__ or "").split())
            ]
            missing = [method for method in wanted if not callable(getattr(cls, method, None))]
            assert not missing, f"{who}: {cls.__name__} has no method {missing[0]} ({protocol})"

    def test_each_component_can_be_selected(self, plugins: Plugins, provided: list[Provided]) -> None:
        for one in provided:
            selected_values(one.group, one.component.name, plugins, self.overrides)

    def test_words_can_be_read(self, provided: list[Provided]) -> None:
        for one in provided:
            problems = malformed(one.component)
            assert not problems, f"{one.group}={one.component.name}: {problems[0]}"
            odd = [word for word in one.component.provides if not re.fullmatch(r"[a-z]\w*", word)]
            assert not odd, f"{one.group}={one.component.name}: provides {odd[0]!r}, which is no word"

    def test_words_are_known(self, plugins: Plugins, record: PluginRecord) -> None:
        """One that nobody provides refuses every pipeline, or none: it is misspelt, or of a plugin that is not installed."""
        unknown = unknown_words(record, plugins)
        assert not unknown, unknown[0]

    def test_parameters_of_requests_are_checked(self, provided: list[Provided]) -> None:
        for one in provided:
            if one.component.params is not None:
                params, who = import_target(one, one.component.params), f"{one.group}={one.component.name}"
                assert one.group == "logits_processors", f"{who}: only logits processors have params"
                good = inspect.isclass(params) and issubclass(params, BaseModel)
                assert good, f"{who}: {one.component.params} is no pydantic model"
                closed = params.model_config.get("extra") == "forbid"
                assert closed, f"{who}: {params.__name__} takes unknown keys, which a client would never hear of"

    def test_config_options_are_of_components(self, plugins: Plugins, record: PluginRecord) -> None:
        for package in record.config_packages:
            for path in config_files(package):
                self._check_option(plugins, package, path)

    def _check_option(self, plugins: Plugins, package: str, path: Path) -> None:
        """`path` is relative to the package: scheduler/lottery.yaml."""
        group, option, where = path.parent.as_posix(), path.stem, f"{package}: {path}"
        known = (*GROUPS, *CHAINS, *FREE_GROUPS)
        assert group in known, f"{where} is in no config group{near_matches(group, known)}"
        try:
            if group in FREE_GROUPS:
                compose([f"+{group}={option}", *self.overrides], plugins)
            else:
                selected_values(group, option, plugins, self.overrides)
        except NonetError as error:
            raise AssertionError(f"{where} cannot be selected: {error}") from error

    def test_the_wheel_brings_only_packages_of_its_own(self, record: PluginRecord) -> None:
        """Another wheel's `core`, `plugins` or `configs` would overwrite Nonet's."""
        if record.builtin:
            pytest.skip("they are ours")
        files = Distribution.from_name(record.distribution).files
        if files is None:
            pytest.skip("its installer left no list of files")
        foreign = sorted(str(path) for path in files if path.parts[0] in OURS)
        assert not foreign, f"the wheel brings {foreign[0]}, which is Nonet's place"


def config_files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} has no __init__.py, so its files are not found"
    folder = Path(spec.origin).parent
    return sorted(path.relative_to(folder) for path in folder.rglob("*.yaml"))
