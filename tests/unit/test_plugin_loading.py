"""Discovery and isolation: entry points are loaded one by one, and a bad one is named and left out."""

from __future__ import annotations

import sys
import types

import pytest

import core.plugins as loading
from core.errors import PluginError
from core.hookspecs import Component, hookimpl
from core.plugins import load_plugins


class FakeDistribution:
    def __init__(self, name: str, version: str = "1.2"):
        self.metadata = {"Name": name}
        self.version = version


class FakePoint:
    """An `importlib.metadata.EntryPoint` of a wheel that is not installed."""

    def __init__(self, name: str, plugin: object, dist: str = "acme-plugins"):
        self.name, self.value, self.dist, self._plugin = name, f"acme.{name}", FakeDistribution(dist), plugin

    def load(self) -> object:
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


@pytest.fixture
def install(monkeypatch):
    def install(*points):
        monkeypatch.setattr(loading, "entry_points", lambda group: list(points))

    return install


def plugin_with(**hooks):
    module = types.ModuleType("acme")
    for name, fn in hooks.items():
        setattr(module, name, hookimpl(fn))
    return module


def lottery():
    return [Component("lottery", "acme.lottery:Lottery", "tickets")]


def test_a_third_party_component_is_found(install):
    install(FakePoint("acme", plugin_with(provide_schedulers=lottery)))
    found = load_plugins().find("scheduler", "lottery")
    assert (found.plugin.distribution, found.plugin.version) == ("acme-plugins", "1.2")


def test_a_hook_may_have_a_name_of_its_own(install):
    """`specname` is pluggy's: the function that provides need not be called like the hook."""
    module = types.ModuleType("acme")
    module.tickets = hookimpl(lottery, specname="provide_schedulers")
    install(FakePoint("acme", module))
    plugins = load_plugins()
    assert plugins.find("scheduler", "lottery").plugin.hooks == ("provide_schedulers",)
    assert [p.component.name for p in plugins.components("scheduler")] == ["fcfs", "lottery"]


def test_a_hook_that_gives_nothing_provides_nothing(install):
    install(FakePoint("acme", plugin_with(provide_schedulers=lambda: None, provide_samplers=lambda: ())))
    (record,) = [record for record in load_plugins().records if record.name == "acme"]
    assert (record.status, record.components) == ("loaded", ())


def test_third_parties_come_after_builtins_sorted_by_name(install):
    install(FakePoint("zeta", plugin_with()), FakePoint("acme", plugin_with()))
    names = [record.name for record in load_plugins().records]
    assert names[-2:] == ["acme", "zeta"]
    assert names[: len(loading.BUILTINS)] == [name.partition(":")[0] for name in loading.BUILTINS]


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (ImportError("no module named flash"), "no module named flash"),
        (plugin_with(provide_scheduler=lottery), "did you mean provide_schedulers"),
        (plugin_with(provide_schedulers=lambda: ["lottery"]), "must yield"),
        (plugin_with(provide_schedulers=lambda: [Component("x", "a:B", "", api_version=99)]), "plugin API 99"),
        (plugin_with(provide_schedulers=lambda: 1 / 0), "ZeroDivisionError"),
        (plugin_with(step_finished=lambda stats, more: None), "more"),
        (plugin_with(request_finished=lambda: None), "exactly one argument"),
        (SystemExit("wrong platform"), "wrong platform"),
        (plugin_with(provide_config_packages=lambda: ["core.no_configs"]), "'core.no_configs'"),
        (plugin_with(provide_config_packages=lambda: ["nowhere.configs"]), "nowhere"),
    ],
)
def test_a_bad_plugin_is_isolated_with_its_reason(install, plugin, reason):
    install(FakePoint("bad", plugin), FakePoint("good", plugin_with(provide_schedulers=lottery)))
    plugins = load_plugins()
    status = {record.name: record for record in plugins.records}
    assert status["bad"].status == "failed"
    assert reason in status["bad"].reason
    assert plugins.find("scheduler", "lottery").plugin.name == "good"
    with pytest.raises(PluginError, match="bad"):
        plugins.find("scheduler", "its_scheduler")


def test_a_name_claimed_twice_is_refused_when_selected(install):
    install(
        FakePoint("a", plugin_with(provide_schedulers=lottery)), FakePoint("b", plugin_with(provide_schedulers=lottery))
    )
    with pytest.raises(PluginError, match="more than one plugin: a, b"):
        load_plugins().find("scheduler", "lottery")
    assert load_plugins(["b"]).find("scheduler", "lottery").plugin.name == "a"


def test_a_builtin_name_cannot_be_taken_over(install):
    install(FakePoint("evil", plugin_with(provide_schedulers=lambda: [Component("fcfs", "evil:Fcfs", "")])))
    with pytest.raises(PluginError, match="evil"):
        load_plugins().find("scheduler", "fcfs")


@pytest.mark.parametrize("name", ["acme", "acme-plugins", "all"])
def test_a_plugin_can_be_disabled_by_plugin_or_distribution(install, name):
    install(FakePoint("acme", plugin_with(provide_schedulers=lottery)))
    for plugins in (load_plugins([name], environ={}), load_plugins(environ={loading.DISABLE_VARIABLE: name})):
        assert plugins.records[-1].status == "disabled"
        assert "lottery" not in plugins.names("scheduler")


def test_observers_of_third_parties_run_only_when_enabled(install):
    seen = []
    install(FakePoint("acme", plugin_with(step_finished=lambda stats: seen.append(stats))))
    plugins = load_plugins()
    ours = len(plugins.observers("step_finished", ()))
    assert len(plugins.observers("step_finished", ("acme",))) == ours + 1


def test_hook_listing_imports_no_torch():
    import subprocess

    code = "import sys; from core.plugins import load_plugins; load_plugins(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_enabling_a_plugin_whose_observers_cannot_run_is_refused(install):
    install(
        FakePoint("acme", plugin_with()), FakePoint("bad", ImportError("no flash")), FakePoint("off", plugin_with())
    )
    plugins = load_plugins(["off"])
    plugins.check_enabled(["acme", "core.metrics"])
    for name, reason in (("acmee", "did you mean acme"), ("bad", "no flash"), ("off", "disabled")):
        with pytest.raises(PluginError, match=reason):
            plugins.check_enabled(["acme", name])


def test_an_observer_that_wraps_is_refused_alone(install):
    module = types.ModuleType("acme")

    @hookimpl(wrapper=True)
    def step_finished(stats):
        return (yield)

    module.step_finished = step_finished
    install(FakePoint("bad", module), FakePoint("good", plugin_with()))
    status = {record.name: record for record in load_plugins().records}
    assert status["good"].status == "loaded"
    assert (status["bad"].status, "cannot be a wrapper" in status["bad"].reason) == ("failed", True)


def test_a_plugin_disabled_on_the_command_line_is_not_even_imported(install):
    from core.compose import disabled_by

    class Poison(FakePoint):
        def load(self):
            raise AssertionError("imported")

    install(Poison("poison", None))
    assert disabled_by(["+preset=chat", "plugins.disable=[poison,other]", "scheduler=fcfs"]) == ("poison", "other")
    assert disabled_by(["plugins.disable=poison"]) == ("poison",)
    record = load_plugins(disabled_by(["plugins.disable=[poison]"])).records[-1]
    assert record.status == "disabled"
