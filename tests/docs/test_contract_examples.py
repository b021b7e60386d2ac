"""The examples of the hooks and of the contracts are one plugin: it is listed, it is clean, and it passes the suites."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core import docs
from core.components import CHAINS, GROUPS
from core.contracts import CONTRACTS
from core.hookspecs import API_VERSION
from core.loading.listing import Listing, list_plugin

ROOT = Path(__file__).resolve().parents[2]
ALL = (*GROUPS, *CHAINS)
HEAD = f'from core.hookspecs import Component, hookimpl\n\nNONET_API = "{API_VERSION}"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Hook examples in acme/plugin.py, and each contract's where the hook's example says that it is."""
    folder = tmp_path_factory.mktemp("examples")
    acme = folder / "acme"
    (acme / "configs").mkdir(parents=True)
    for package in (acme, acme / "configs"):
        (package / "__init__.py").write_text("")
    (acme / "plugin.py").write_text("\n\n\n".join([HEAD, *map(docs.example, docs.hooks())]) + "\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def listing(folder) -> Listing:
    listing = list_plugin(importlib.import_module("acme.plugin"), API_VERSION)
    for group, component in listing.components:
        module = component.target.partition(":")[0].removeprefix("acme.")
        (folder / "acme" / f"{module}.py").write_text(docs.example(docs.contract(group)) + "\n", encoding="utf-8")
    importlib.invalidate_caches()
    return listing


def component_of(listing: Listing, group: str) -> type:
    (target,) = [component.target for name, component in listing.components if name == group]
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def test_the_hooks_examples_are_a_plugin_with_a_component_for_every_group(listing):
    assert [group for group, _ in listing.components] == list(ALL)
    assert (listing.config_packages, listing.warnings) == (("acme.configs",), ())
    assert set(listing.hooks) == {hook.__name__ for hook in docs.hooks()}


def test_the_examples_are_clean(folder, listing):
    rules = ["--isolated", "--line-length", "112"]
    select = ["--select", "E,F,I,UP,B,W"]
    for command in (["check", *rules, *select, "."], ["format", "--check", *rules, "."]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], cwd=folder / "acme", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout


def members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def shape(function: object) -> list[tuple[str, object, object]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("group", ALL)
def test_an_example_has_settings_a_constructor_and_the_methods_of_its_contract(listing, group):
    component, protocol = component_of(listing, group), docs.contract(group)
    assert component.Settings.model_config["frozen"] and component.Settings.model_config["extra"] == "forbid"
    component.Settings()
    assert [name for name, *_ in shape(component)] == ["settings", "context"]
    assert members(protocol)
    for name in members(protocol):
        promised, found = inspect.getattr_static(protocol, name), inspect.getattr_static(component, name)
        assert isinstance(found, property) == isinstance(promised, property), name
        if not isinstance(promised, property):
            assert shape(found) == shape(promised), name
            assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(promised), name


@pytest.mark.parametrize("group", ALL)
def test_an_example_is_short(group):
    assert 8 <= len(docs.example(docs.contract(group)).splitlines()) <= 52


@pytest.mark.slow
def test_every_example_passes_the_suite_of_its_contract(folder, listing):
    lines = ["import importlib", ""]
    for group, component in listing.components:
        (module, _, name), suite = component.target.partition(":"), CONTRACTS[group].suite.partition(":")
        lines += [
            f"from {suite[0]} import {suite[2]} as _{group}",
            f"class Test_{group}(_{group}):",
            f'    component = importlib.import_module("{module}").{name}',
            f"    provides = frozenset({list(component.provides)})",
        ]
        if component.params is not None:
            params = component.params.partition(":")
            lines.append(f'    params = importlib.import_module("{params[0]}").{params[2]}')
    tests = folder / "test_suites.py"
    tests.write_text("\n".join(lines) + "\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", tests.name]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 300


def test_the_page_is_made_without_torch():
    code = "import sys, core.docs; core.docs.render(); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
