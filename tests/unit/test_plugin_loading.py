"""Discovery and isolation: entry points are listed one by one, and a bad one is named with its reason and left out."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import types

import pytest

import core.plugins as loading
from core.errors import PluginError
from core.hookspecs import API_VERSION, Component, hookimpl
from core.plugins import load_plugins
from core.testing.harness.entry_points import FakePoint, lottery, plugin_with, record_of


@pytest.fixture
def install(monkeypatch):
    def install(*points):
        monkeypatch.setattr(loading, "entry_points", lambda group: list(points))

    return install


def scheduler(**fields):
    """A plugin whose one component differs from a good one in `fields`."""
    good = {"name": "x", "target": "a.b:C", "summary": ""}
    return plugin_with(provide_schedulers=lambda: [Component(**{**good, **fields})])


def test_a_third_party_component_is_found(install):
    install(FakePoint("acme", plugin_with(provide_schedulers=lottery)))
    found = load_plugins().find("scheduler", "lottery")
    assert found.who == "scheduler=lottery (plugin acme, acme-plugins 1.2)"
    assert (found.plugin.api, found.plugin.warnings) == (API_VERSION, ())


def test_a_hook_may_have_a_name_of_its_own(install):
    """`specname` is pluggy's: the function that provides need not be called like the hook."""
    module = plugin_with()
    module.tickets = hookimpl(lottery, specname="provide_schedulers")
    install(FakePoint("acme", module))
    plugins = load_plugins()
    assert plugins.find("scheduler", "lottery").plugin.hooks == ("provide_schedulers",)
    assert [p.component.name for p in plugins.components("scheduler") if not p.plugin.builtin] == ["lottery"]


def test_a_plugin_may_be_an_object(install):
    class Plugin:
        NONET_API = API_VERSION

        @hookimpl
        def provide_schedulers(self):
            return lottery()

    install(FakePoint("acme", Plugin()))
    assert load_plugins().find("scheduler", "lottery").plugin.name == "acme"


def test_a_hook_that_gives_nothing_provides_nothing(install):
    install(FakePoint("acme", plugin_with(provide_schedulers=lambda: None, provide_samplers=lambda: ())))
    record = record_of(load_plugins(), "acme")
    assert (record.status, record.components) == ("loaded", ())


def test_third_parties_come_after_builtins_sorted_by_name(install):
    install(FakePoint("zeta", plugin_with()), FakePoint("acme", plugin_with()))
    names = [record.name for record in load_plugins().records]
    assert names == [*loading.BUILTINS, "acme", "zeta"]


def test_every_builtin_is_of_this_api_and_has_nothing_to_mend(install):
    install()
    plugins = load_plugins()
    assert {(record.status, record.api, record.warnings) for record in plugins.records} == {("loaded", API_VERSION, ())}


class Rude(BaseException):
    def __str__(self):
        raise ValueError("no words")


def endless():
    return (Component(f"x{i}", "a:B", "") for i in itertools.count())


BAD = {
    "import error": (ImportError("no module\nnamed flash"), "ImportError: no module named flash"),
    "exit": (SystemExit("wrong platform"), "SystemExit: wrong platform"),
    "interrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "base exception": (Rude(), "Rude"),
    "unknown hook": (plugin_with(provide_scheduler=lottery), "did you mean provide_schedulers"),
    "unknown argument": (plugin_with(provide_schedulers=lambda request: lottery()), "request"),
    "not iterable": (plugin_with(provide_schedulers=lambda: lottery()[0]), "it returned Component"),
    "text": (plugin_with(provide_schedulers=lambda: "lottery"), "it returned str"),
    "no component": (
        plugin_with(provide_schedulers=lambda: ["lottery"]),
        "must yield core.hookspecs.Component, not str",
    ),
    "endless": (plugin_with(provide_schedulers=endless), "provide_schedulers yields more than 1000"),
    "raises": (plugin_with(provide_schedulers=lambda: 1 / 0), "ZeroDivisionError: division by zero"),
    "twice": (plugin_with(provide_schedulers=lambda: lottery() * 2), "provides scheduler=lottery twice"),
    "no name": (scheduler(name=""), "provide_schedulers yields a component without a name ('')"),
    "name is no text": (scheduler(name=7), "without a name (7)"),
    "bad letters": (scheduler(name="my/sched"), "scheduler='my/sched' cannot be a name"),
    "a value": (scheduler(name="null"), "scheduler='null' cannot be a name"),
    "a word of hydra": (scheduler(name="_self_"), "scheduler='_self_' cannot be a name"),
    "too long": (scheduler(name="a" * 10**6), "cannot be a name"),
    "no colon": (scheduler(target="a.b.C"), "scheduler=x: target='a.b.C' is not written as \"package.module:Class\""),
    "target is no text": (scheduler(target=dict), "scheduler=x: target="),
    "settings": (scheduler(settings="a.b"), "scheduler=x: settings='a.b'"),
    "params": (scheduler(params="a:b:c"), "scheduler=x: params='a:b:c'"),
    "summary": (scheduler(summary=None), "summary must be a line of text"),
    "a word": (scheduler(requires="sampler.drafts"), "scheduler=x: requires must be a tuple of words"),
    "no word": (scheduler(provides=("",)), "scheduler=x: provides must be a tuple of words"),
    "accepts": (scheduler(accepts={"device": "cpu"}), "scheduler=x: accepts must map a fact to a tuple"),
    "no configs": (plugin_with(provide_config_packages=lambda: ["core.no_configs"]), "'core.no_configs'"),
    "config package": (plugin_with(provide_config_packages=lambda: [1]), "must yield package names, not int"),
    "nowhere": (plugin_with(provide_config_packages=lambda: ["nowhere.configs"]), "No module named 'nowhere'"),
}


@pytest.mark.parametrize(("plugin", "reason"), BAD.values(), ids=BAD)
def test_a_bad_plugin_is_isolated_with_its_reason_in_one_line(install, plugin, reason):
    install(FakePoint("bad", plugin), FakePoint("good", plugin_with(provide_schedulers=lottery)))
    plugins = load_plugins()
    record = record_of(plugins, "bad")
    assert (record.status, record.components, record.hooks) == ("failed", (), ())
    assert reason in record.reason and record.reason.isprintable()
    assert plugins.find("scheduler", "lottery").plugin.name == "good"
    with pytest.raises(PluginError, match=r"plugins that failed to load: bad \(acme-plugins 1.2\): "):
        plugins.find("scheduler", "its_scheduler")


def test_a_summary_is_a_short_line(install):
    install(FakePoint("acme", scheduler(summary="one\ntwo\x1b[2J\ud800 " + "x" * 10**6)))
    ((_, component),) = record_of(load_plugins(), "acme").components
    assert component.summary == f"one two?[2J? {'x' * 187}…"


def test_a_failed_import_is_explained_by_what_its_wheel_asks_for(install):
    error = ImportError("cannot import name 'provide_routers' from 'core.hookspecs'")
    install(FakePoint("bad", error, requires=("surely-not-installed>=2", "pytest")))
    reason = record_of(load_plugins(), "bad").reason
    assert reason == f"ImportError: {error}; acme-plugins asks for surely-not-installed>=2, and it is not installed"


def test_a_failed_import_is_explained_by_the_api_its_source_names(install, monkeypatch, tmp_path):
    (tmp_path / "acme_bad").mkdir()
    (tmp_path / "acme_bad/plugin.py").write_text("NONET_API = '9.0'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    install(FakePoint("bad", ImportError("cannot import name 'provide_routers'")))
    assert record_of(load_plugins(), "bad").reason.startswith("is written for plugin API 9.0, this Nonet has ")


@pytest.mark.parametrize(("api", "reason"), [("9.0", "is written for plugin API 9.0"), (None, "does not say which")])
def test_a_plugin_of_another_api_is_refused(install, api, reason):
    install(FakePoint("acme", plugin_with(api, provide_schedulers=lottery)))
    assert record_of(load_plugins(), "acme").reason.startswith(reason)


def test_a_reason_is_never_a_page(install):
    install(FakePoint("bad", ImportError("x" * 10_000 + "\x1b[31m")))
    assert len(record_of(load_plugins(), "bad").reason) < 500


def test_a_plugin_that_does_not_come_back_is_left_behind(install):
    never = threading.Event()

    def waits():
        never.wait()
        return plugin_with()

    install(FakePoint("slow", waits), FakePoint("good", plugin_with(provide_schedulers=lottery)))
    plugins = load_plugins(start_timeout=0.05)
    never.set()
    assert record_of(plugins, "slow").reason.startswith("did not load within 0.05 s; give it longer with ")
    assert record_of(plugins, "good").status == "loaded"


def test_a_hook_that_does_not_come_back_is_left_behind_too(install):
    never = threading.Event()
    install(FakePoint("slow", plugin_with(provide_schedulers=lambda: never.wait() and [])))
    plugins = load_plugins(environ={loading.START_TIMEOUT_VARIABLE: "0.05"})
    never.set()
    assert "did not load within 0.05 s" in record_of(plugins, "slow").reason


def test_a_component_name_that_two_claim_belongs_to_neither(install):
    install(
        FakePoint("a", plugin_with(provide_schedulers=lottery), dist="acme-a"),
        FakePoint("b", plugin_with(provide_schedulers=lottery), dist="acme-b"),
    )
    with pytest.raises(PluginError, match=r"its scheduler=lottery is also provided by b \(acme-b 1.2\)"):
        load_plugins().find("scheduler", "lottery")
    with pytest.raises(PluginError, match=r"plugins.disable=\[a,b\]"):
        load_plugins().check_start("refuse")
    plugins = load_plugins(["b"])
    plugins.check_start("refuse")
    assert plugins.find("scheduler", "lottery").plugin.name == "a"


def test_a_plugin_name_that_two_claim_belongs_to_neither(install):
    install(
        FakePoint("acme", plugin_with(provide_schedulers=lottery), dist="acme-a"),
        FakePoint("acme", plugin_with(), dist="acme-b"),
    )
    plugins = load_plugins()
    assert [record.reason.partition(";")[0] for record in plugins.failed()] == [
        "the plugin name 'acme' is also that of acme-b 1.2",
        "the plugin name 'acme' is also that of acme-a 1.2",
    ]
    with pytest.raises(PluginError, match=r"plugins.disable=\[acme-a,acme-b\]"):
        plugins.check_start("refuse")
    plugins = load_plugins(["acme-b"])
    plugins.check_start("refuse")
    assert plugins.find("scheduler", "lottery").plugin.distribution == "acme-a"


def test_a_builtin_keeps_its_names(install):
    evil = plugin_with(provide_schedulers=lambda: [Component("fcfs", "evil:Fcfs", "")])
    install(FakePoint("evil", evil), FakePoint("core.builtin", plugin_with()))
    plugins = load_plugins()
    assert plugins.find("scheduler", "fcfs").plugin.builtin
    assert "its scheduler=fcfs is also provided by plugins.schedulers (nonet" in record_of(plugins, "evil").reason
    assert [record.name for record in plugins.failed()] == ["core.builtin", "evil"]


@pytest.mark.parametrize("name", ["acme", "acme-plugins", "Acme_Plugins", "all"])
def test_a_plugin_can_be_disabled_by_plugin_or_distribution(install, name):
    install(FakePoint("acme", plugin_with(provide_schedulers=lottery)))
    for plugins in (load_plugins([name], environ={}), load_plugins(environ={loading.DISABLE_VARIABLE: name})):
        assert plugins.records[-1].status == "disabled"
        assert "lottery" not in plugins.names("scheduler")


def test_disabling_what_is_not_there_is_refused_with_near_matches(install):
    install(FakePoint("acme", plugin_with()))
    for name, reason in (
        ("acmee", "no plugin or distribution is called 'acmee'; did you mean acme"),
        ("plugins.quant", "'plugins.quant' is built in"),
    ):
        with pytest.raises(PluginError, match=reason):
            load_plugins([name])
    assert load_plugins(environ={loading.DISABLE_VARIABLE: "acmee"}).records[-1].status == "loaded"
    install()
    with pytest.raises(PluginError, match="'acme'; none is installed"):
        load_plugins(["acme"])
    load_plugins(["all"])


def test_hook_listing_imports_no_torch():
    code = "import sys; from core.plugins import load_plugins; load_plugins(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_an_author_should_mend_is_told(install, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def unmarked():
        return []

    unmarked.__module__ = "acme"

    def imports_torch():
        sys.modules["torch"] = types.ModuleType("torch")
        return lottery()

    module = plugin_with(provide_schedulers=imports_torch)
    module.provide_samplers = unmarked
    install(FakePoint("acme", module), FakePoint("empty", plugin_with()))
    plugins = load_plugins()
    assert record_of(plugins, "acme").warnings == (
        "its function provide_samplers is not marked @hookimpl, and is not called",
        "imports torch when it is listed; import it in the modules that its targets name",
    )
    assert record_of(plugins, "empty").warnings == ("implements no hook, so it provides nothing",)
    assert plugins.find("scheduler", "lottery").plugin.name == "acme"
