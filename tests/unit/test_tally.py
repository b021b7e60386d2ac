"""Failures of components: counted, logged in full while they are few and seldom when they are many, and told on one line."""

from __future__ import annotations

import logging

import pytest

from core.errors import MAX_REASON, MAX_SHOWN, ConfigError, PluginError, described, shown
from core.isolation.faults import ComponentName, Faults, Names, StageError, Tally, blocked_text
from core.isolation.incidents import Incidents
from core.outputs import PluginIncident

PART = ComponentName("sampler", "chaos", "chaos, acme 1.0", "acme.sampler:Chaos")
WHO = "sampler=chaos (plugin chaos, acme 1.0)"


class Mute(Exception):
    def __str__(self):
        raise ValueError("mute")

    __repr__ = __str__


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_thousand_failures_of_the_front_are_a_dozen_lines(caplog):
    incidents = Incidents()
    for _ in range(1000):
        incidents.failed(PART, "ValueError: boom", error=raised(ValueError("boom")))
    assert incidents.of(PART).failures == 1000
    assert [record.args[-1] for record in caplog.records] == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512]
    assert all(f"{WHO}: ValueError: boom (failure " in record.getMessage() for record in caplog.records)
    assert len(caplog.text) < 10_000


def test_so_many_failures_or_a_final_one_switch_it_off_for_good(caplog):
    log = logging.getLogger("nonet.test")
    tally = Tally(PART, log, quarantine_after=3)
    assert [tally.failed("no").quarantined for _ in range(5)] == [False, False, True, True, True]
    assert caplog.text.count(f"{WHO} is switched off until the next start, after 3 failures: no") == 1
    last = Tally(PART, log)
    assert not last.quarantined
    assert last.failed("blocked", final=True).quarantined and last.failed("again").quarantined
    assert last.latest == PluginIncident(
        group="sampler", name="chaos", plugin="chaos, acme 1.0", reason="again", failures=2, quarantined=True
    )


def boom():
    raise ZeroDivisionError("in the plugin")


@pytest.mark.parametrize("way", ["fail_by", "fail", "note"])
def test_what_a_plugin_of_the_engine_raised_is_logged_with_its_traceback(way, caplog):
    faults = Faults(Names([PART]))
    with pytest.raises(StageError) as caught:
        faults.call("sampler", "a", boom)
    error = caught.value
    if way == "fail_by":
        assert faults.fail_by(error, "sampler", "a") == f"{WHO}: ZeroDivisionError: in the plugin"
    elif way == "fail":
        faults.fail("sampler", error.reason, "a", error)
    else:
        faults.note("sampler", error.reason, error)
    (record,) = caplog.records
    assert record.exc_info[1] is error.__cause__ and "in boom" in caplog.text


def test_an_answer_that_breaks_the_contract_has_no_traceback_of_ours(caplog):
    faults = Faults(Names([PART]))
    faults.fail_by(raised(StageError("sampler", "it returned None")), "executor", "a")
    (record,) = caplog.records
    assert not record.exc_info and record.getMessage() == f"{WHO}: it returned None (failure 1)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines\tand \x1b[31m"), "ValueError: two lines and ?[31m"),
        (ValueError("half \ud800"), "ValueError: half ?"),
        (SystemExit(), "SystemExit"),
        (Mute(), "Mute: an error without a text"),
        (PluginError("sampler=x failed"), "sampler=x failed"),
        (ConfigError("x"), "ConfigError: x"),
    ],
)
def test_any_error_has_one_printable_line(error, text):
    assert described(error) == text


def test_long_words_are_cut():
    assert len(described(ValueError("x" * 10_000))) == MAX_REASON + 1
    assert shown("x" * 1000) == "'" + "x" * (MAX_SHOWN - 1) + "…"
    assert shown(Mute()) == "a Mute" and shown("\ud800\n") == r"'\ud800\n'"


def test_one_wording_of_a_call_that_blocks():
    assert blocked_text(7.04, 5.0) == "blocked 7.0 s in one call (plugins.block_timeout=5)"
