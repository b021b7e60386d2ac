"""SIGTERM and SIGINT while `serve` starts: one exit status, whatever they interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from core.commands.serve import _StartSignals
from core.errors import ConfigError, Terminated

STATUS = {signal.SIGTERM: 0, signal.SIGINT: 130}


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def number(request):
    before = {each: signal.getsignal(each) for each in STATUS}
    yield request.param
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_signal_ends_the_start(number):
    went_on = False
    with pytest.raises(Terminated) as ended, _StartSignals():
        signal.raise_signal(number)
        went_on = True
    assert ended.value.code == STATUS[number] and not went_on


def test_code_that_answers_with_another_error_does_not_change_the_status(number):
    with pytest.raises(Terminated) as ended, _StartSignals():
        try:
            signal.raise_signal(number)
        finally:
            raise ConfigError("what a library makes of it")
    assert ended.value.code == STATUS[number]


def test_code_that_swallows_it_does_not_keep_the_server_running(number):
    went_on = False
    with pytest.raises(Terminated) as ended, _StartSignals() as signals:
        with suppress(BaseException):
            signal.raise_signal(number)
        signals.check()
        went_on = True
    assert ended.value.code == STATUS[number] and not went_on


def test_one_more_signal_changes_nothing(number):
    with pytest.raises(Terminated) as ended, _StartSignals():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == STATUS[number]


@pytest.mark.parametrize("first", STATUS)
def test_a_third_signal_waits_for_nothing(first):
    code = f"""
import signal
from core.commands.serve import _StartSignals
with _StartSignals():
    try:
        signal.raise_signal({int(first)})
    finally:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        print("it still waits")
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (STATUS[first], b"", b"")


def test_signals_on_the_way_out_are_no_first_one():
    code = """
import signal
from core.commands.serve import _StartSignals
with _StartSignals():
    pass
signal.raise_signal(signal.SIGTERM)
print("it ended by itself")
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"it ended by itself\n")


def test_without_a_signal_errors_pass(number):
    with pytest.raises(ConfigError), _StartSignals() as signals:
        signals.check()
        raise ConfigError("ours")


def test_a_signal_within_an_exec_has_the_same_exit_status():
    """CPython would end by SIGINT: whether a KeyboardInterrupt left an `exec` outlives that it is caught."""
    code = """
import signal
from core.commands.serve import _StartSignals

def during_exec():
    with _StartSignals():
        exec("signal.raise_signal(signal.SIGINT)")
during_exec()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 130
