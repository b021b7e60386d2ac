"""The kit around the suites: what is asked for, what is told of a failed check, and what counts."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from core.commands.plugins_check import report, run
from core.components import PluginRecord, Provided
from core.hookspecs import Component
from core.plugins import load_plugins
from core.testing.clocks import trap_clocks
from core.testing.conformance import Checked, Outcome, Subject
from core.testing.conformance_child import alarm, reason_of
from core.testing.contract import Contract
from core.testing.selection import selected_values, unusable_override


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: plugins check PACKAGE"),
        (["a", "b"], "usage: plugins check PACKAGE"),
        (["a", "--builtins"], "usage: plugins check PACKAGE"),
        (["a", "--grup", "scheduler"], "did you mean --group?"),
        (["a", "--group"], "--group needs a value"),
        (["--builtins", "--group=shedulers"], "did you mean scheduler"),
        (["--builtins", "--timeout=soon"], "--timeout=soon: seconds"),
        (["no-such-plugin-anywhere"], "no installed package or plugin is called 'no-such-plugin-anywhere'"),
    ],
)
def test_a_command_that_names_nothing_to_check_is_answered_with_2(arguments, said, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_without_pytest_the_way_to_have_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["--builtins"]) == 2
    assert "pip install pytest" in capsys.readouterr().err


def outcome(check: str, node: str, result: str, reason: str = "") -> Outcome:
    return Outcome("scheduler=x", check, node, result, reason)


def test_failures_of_one_check_are_told_once_and_skipped_ones_are_no_checks():
    checked = Checked(
        "scheduler=x",
        [
            outcome("test_a", "a[1]", "passed"),
            outcome("test_a", "a[2]", "failed", "first"),
            outcome("test_a", "a[3]", "failed", "second"),
            outcome("test_b", "b", "skipped"),
        ],
    )
    assert report([checked]) == {
        "components": [
            {
                "subject": "scheduler=x",
                "checks": 3,
                "skipped": 1,
                "failed": [{"check": "test_a", "reason": "first", "times": 2}],
            }
        ],
        "checks": 3,
        "failed": 1,
    }


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("AssertionError: token budget exceeded\nassert 96 <= 64", "token budget exceeded; assert 96 <= 64"),
        ("assert 1 == 2", "assert 1 == 2"),
        ("ValueError: no\nmore words", "ValueError: no"),
        ("Failed: DID NOT RAISE <class 'KeyError'>", "DID NOT RAISE <class 'KeyError'>"),
    ],
)
def test_a_reason_is_one_line(message, reason):
    assert reason_of(SimpleNamespace(reprcrash=SimpleNamespace(message=message))) == reason


def test_reasons_of_skips_and_of_what_has_no_line_of_its_own():
    assert reason_of(("file.py", 3, "Skipped: it does not provide drafts")) == "Skipped: it does not provide drafts"
    assert reason_of("some\nE   ImportError: no such module\n") == "ImportError: no such module"


def test_a_subject_crosses_to_the_child_and_chooses():
    subject = Subject(("lottery",), group="scheduler", overrides=("scheduler.tickets=3",))
    assert Subject.from_dict(json.loads(json.dumps(subject.as_dict()))) == subject
    record = PluginRecord("lottery", "nonet-lottery", "1.0", "loaded")
    one, other = (Provided(group, Component("x", "a:B", ""), record) for group in ("scheduler", "observers"))
    assert subject.chooses(one) and not subject.chooses(other)
    assert not Subject(("lottery",), component="y").chooses(one)


def test_an_alarm_ends_what_does_not_end():
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0.05 s, in test_conformance.py:"):  # noqa: SIM117
        with alarm(0.05):
            while True:
                pass


class Component_:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        words: dict[str, int] = {}

    def __init__(self, settings, context):
        self.settings = settings


class Suite(Contract):
    component = Component_
    settings = {"words": {"a": 1}}


def test_values_of_a_check_are_above_those_of_the_class():
    assert Suite().make(None).settings.words == {"a": 1}
    assert Suite().make(None, words={"b": 2}).settings.words == {"b": 2}


def test_settings_that_are_changed_deep_inside_are_noticed():
    suite = Suite()
    made = suite.make(None)
    suite.assert_settings_stay()
    made.settings.words["a"] = 2
    with pytest.raises(AssertionError, match="changed its settings"):
        suite.assert_settings_stay()


def test_a_trapped_clock_is_noticed_also_under_another_name(monkeypatch):
    import time

    called = trap_clocks(monkeypatch, Component_)
    with pytest.raises(AssertionError, match=r"time.monotonic\(\) was called"):
        time.monotonic()
    with pytest.raises(AssertionError, match=r"datetime.now\(\) was called"):
        __import__("datetime").datetime.now()
    monkeypatch.undo()
    assert called == ["time.monotonic", "datetime.now"] and time.monotonic() > 0


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "schedulr.max_num_running_reqs=4",
            "unknown config key 'schedulr.max_num_running_reqs'; did you mean scheduler?",
        ),
        ("scheduler.max_num_runing_reqs=4", "did you mean max_num_running_reqs?"),
        ("sampler.seed=1", "nothing that is checked is of sampler"),
        ("scheduler=fcfs", "it takes values of what is checked"),
        ("scheduler.max_num_running_reqs=4", None),
        ("scheduler.max_num_running_reqs=none", None),  # a wrong value of a known key: the component's check fails
    ],
)
def test_a_value_of_nothing_that_is_checked_is_named(override, problem):
    found = unusable_override(Subject(("plugins.schedulers",), overrides=(override,)))
    assert (found is None) == (problem is None)
    assert problem is None or (found.startswith(f"--set {override}: ") and problem in found)


def test_values_of_a_member_of_a_chain_are_its_own():
    plugins = load_plugins(("all",))
    overrides = ("observers.jsonl.path=/x", "observers.otel.timeout=3")
    assert selected_values("observers", "jsonl", plugins, overrides) == ("jsonl", {"path": "/x"})
    assert selected_values("observers", "prometheus", plugins, overrides) == ("prometheus", {})


def test_a_wrong_key_is_a_wrong_command_and_no_failed_check(capsys):
    assert run(["plugins.schedulers", "--set", "scheduler.max_num_runing_reqs=4"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "did you mean max_num_running_reqs?" in printed.err


def test_reasons_of_skipped_checks_are_told_on_request_and_a_package_is_no_component(monkeypatch, capsys):
    skipped = Outcome("scheduler=x", "test_drafts", "n", "skipped", "Skipped: it does not provide drafts")
    found = [
        Checked("plugin x", [Outcome("plugin x", "test_it_loads", "p", "passed")]),
        Checked("scheduler=x", [outcome("test_a", "a", "passed"), skipped]),
    ]
    monkeypatch.setattr("core.commands.plugins_check.check", lambda *_: found)
    assert run(["--builtins"]) == 0
    assert "it does not provide drafts" not in capsys.readouterr().out
    assert run(["--builtins", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    skipped test_drafts: it does not provide drafts" in lines
    assert lines[-1] == "checked 1 component: 2 checks, 0 failed"
