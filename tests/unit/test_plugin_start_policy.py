"""What becomes of plugins that failed when something is to be started, and of components that are selected and cannot be used."""

from __future__ import annotations

import logging
import sys
import types

import pytest
from pydantic import BaseModel, model_validator

import core.plugins as loading
from core.assembly import describe
from core.components import CHAINS, GROUPS, import_target
from core.config.compose import compose, values_named
from core.errors import ConfigError, PluginError, Terminated
from core.hookspecs import Component
from core.plugins import default_start_timeout, load_plugins
from core.session import inspect_session, open_session
from core.settings import PluginSettings, Settings
from core.testing.harness.entry_points import FakePoint, lottery, plugin_with, record_of


@pytest.fixture
def install(monkeypatch):
    def install(*points):
        monkeypatch.setattr(loading, "entry_points", lambda group: list(points))

    return install


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_timeout_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="NONET_PLUGINS_START_TIMEOUT="):
        default_start_timeout({loading.START_TIMEOUT_VARIABLE: text})
    assert default_start_timeout({}) == default_start_timeout({loading.START_TIMEOUT_VARIABLE: ""}) == 10.0


def test_a_plugin_disabled_on_the_command_line_is_not_even_imported(install):
    class Poison(FakePoint):
        def load(self):
            raise AssertionError("imported")

    install(Poison("poison", None), FakePoint("other", plugin_with()))
    overrides = ["+preset=chat", "plugins.disable=[poison,other]", "++plugins.start_timeout=3", "scheduler=fcfs"]
    assert values_named(overrides, "plugins") == {"disable": ["poison", "other"], "start_timeout": 3}
    for disable in ("[poison]", "poison"):
        session = open_session([f"plugins.disable={disable}"])
        assert {record.name: record.status for record in session.plugins.records if not record.builtin} == {
            "poison": "disabled",
            "other": "loaded",
        }


def test_what_a_preset_disables_is_left_out_too(install, tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/mine.yaml").write_text("# @package _global_\nplugins:\n  disable: [bad]\n", encoding="utf-8")
    install(FakePoint("bad", ImportError("no flash")))
    assert record_of(open_session([f"config_dir={tmp_path}", "+preset=mine"]).plugins, "bad").status == "disabled"


def plugin_messages(caplog):
    """Threads of other tests may still log."""
    return [record.getMessage() for record in caplog.records if record.name == "nonet.plugins"]


def test_what_failed_refuses_a_start_unless_config_says_to_go_on(install, caplog):
    install(FakePoint("bad", ImportError("no flash")), FakePoint("good", plugin_with(provide_schedulers=lottery)))
    with pytest.raises(PluginError) as refused:
        open_session([])
    assert str(refused.value) == (
        "installed plugins cannot be used: bad (acme-plugins 1.2): ImportError: no flash; go on without: "
        "plugins.disable=[bad] or plugins.on_failure=disable"
    )
    assert inspect_session([]).plugins.failures() == (
        "; plugins that failed to load: bad (acme-plugins 1.2): ImportError: no flash"
    )
    open_session(["plugins.disable=[bad]"])
    assert not plugin_messages(caplog)
    with caplog.at_level(logging.WARNING, "nonet.plugins"):
        session = open_session(["plugins.on_failure=disable"])
    assert plugin_messages(caplog) == ["plugin bad (acme-plugins 1.2) is left out: ImportError: no flash"]
    assert [name for name in session.plugins.fingerprint() if not name.startswith(("core.", "plugins."))] == [
        "good==1.2"
    ]
    with pytest.raises(ConfigError, match="no flash"):
        inspect_session(["scheduler=its_scheduler", "plugins.on_failure=disable"])


def test_the_engine_process_is_told_what_was_left_out(install, tmp_path):
    """So it has the same plugins, and does not wait for the slow one again."""
    install(
        FakePoint("acme", plugin_with(), dist="acme-a"),
        FakePoint("acme", plugin_with(), dist="acme-b"),
        FakePoint("bad", ImportError("no flash")),
        FakePoint("good", plugin_with()),
        FakePoint("off", plugin_with()),
    )
    session = open_session(["plugins.on_failure=disable", "plugins.disable=[off]", "plugins.start_timeout=7"])
    settings = Settings.from_json(session.settings.for_process(tmp_path, session.plugins.left_out())).plugins
    assert (settings.disable, settings.start_timeout) == (("acme-a", "acme-b", "bad", "off"), 7.0)
    theirs = load_plugins(settings.disable)
    assert theirs.fingerprint() == session.plugins.fingerprint()
    theirs.check_start("refuse")


def settings_class(name, config):
    """A component whose nested Settings are as given; its module is there as long as the test runs."""
    from pydantic import BaseModel

    base = BaseModel if config is not None else object
    nested = type("Settings", (base,), {"model_config": config or {}, "__module__": name})
    return type("Policy", (), {"Settings": nested})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "acme_policy:Policy.Settings is no pydantic model"),
        ({"extra": "forbid"}, "acme_policy:Policy.Settings must be frozen"),
        ({"frozen": True}, "acme_policy:Policy.Settings must be frozen and refuse unknown keys"),
    ],
)
def test_a_bad_settings_class_is_named_when_it_is_selected(install, monkeypatch, config, reason):
    module = types.ModuleType("acme_policy")
    module.Policy = settings_class("acme_policy", config)
    monkeypatch.setitem(sys.modules, "acme_policy", module)
    policy = [Component("policy", "acme_policy:Policy", "")]
    install(FakePoint("acme", plugin_with(provide_schedulers=lambda: policy)))
    open_session([])
    with pytest.raises(PluginError, match=r"scheduler=policy \(plugin acme, acme-plugins 1.2\): " + reason):
        open_session(["scheduler=policy"])


class Odd(BaseException):
    pass


@pytest.fixture
def select_with_validator(install, monkeypatch):
    """Select a scheduler whose values are checked by a validator that raises `error`."""

    def select(error):
        def validate(self):
            raise error

        fields = {"_validate": model_validator(mode="after")(validate), "__module__": "acme_policy"}
        settings = type("Settings", (BaseModel,), fields, frozen=True, extra="forbid")
        module = types.ModuleType("acme_policy")
        module.Policy = type("Policy", (), {"Settings": settings})
        monkeypatch.setitem(sys.modules, "acme_policy", module)
        policy = [Component("policy", "acme_policy:Policy", "")]
        install(FakePoint("acme", plugin_with(provide_schedulers=lambda: policy)))
        open_session(["scheduler=policy"])

    return select


@pytest.mark.parametrize("error", [KeyError("odd\x1b"), Odd("odd"), SystemExit(9), GeneratorExit()], ids=repr)
def test_whatever_a_validator_raises_is_one_line_with_its_name(select_with_validator, error):
    with pytest.raises(PluginError) as caught:
        select_with_validator(error)
    text = str(caught.value)
    who = "scheduler=policy (plugin acme, acme-plugins 1.2)"
    assert text.startswith(f"{who}: its Settings cannot be checked: {type(error).__name__}") and text.isprintable()


def test_what_a_validator_says_is_one_printable_line(select_with_validator):
    with pytest.raises(ConfigError, match=r"config key 'scheduler': Value error, odd\?\[2J xxx") as caught:
        select_with_validator(ValueError("odd\x1b[2J\n" + "x" * 1000))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_the_settings_of_every_builtin_are_frozen_and_refuse_unknown_keys(install):
    install()
    plugins = load_plugins()
    for group in (*GROUPS, *CHAINS):
        for name in plugins.names(group):
            choice = f"{group}=[{name}]" if group in CHAINS else f"{group}={name}"
            beside = ["scheduler=srtf"] if group == "predictor" else []  # that asks one
            if choice == "model=cpu":
                beside = ["attention=cpu_paged", "quant=cpu_bf16"]  # which it requires
            settings = Settings.from_config(compose([choice, *beside], plugins).values)
            for part in describe(settings, plugins).parts:
                assert part.settings.model_config["frozen"] and part.settings.model_config["extra"] == "forbid", (
                    part.who
                )


def test_a_target_that_wants_to_exit_is_an_error_and_sigterm_is_not(install, monkeypatch, tmp_path):
    for name, text in (("exits_at_import", "raise SystemExit(3)"), ("ends_at_import", "raise Terminated(0)")):
        text = f"from core.errors import Terminated\n{text}\n"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    install(FakePoint("acme", plugin_with(provide_schedulers=lottery)))
    found = load_plugins().find("scheduler", "lottery")
    with pytest.raises(PluginError, match=r"lottery \(plugin acme.*: cannot import 'exits_at_import:X': SystemExit: 3"):
        import_target(found, "exits_at_import:X")
    with pytest.raises(Terminated):
        import_target(found, "ends_at_import:X")


def test_the_settings_say_how_long_a_start_may_take(monkeypatch):
    monkeypatch.setenv(loading.START_TIMEOUT_VARIABLE, "4")
    assert PluginSettings().start_timeout == 4.0
    assert PluginSettings(start_timeout=2).start_timeout == 2.0
