"""Bars on stderr: one at a time, gone when done, silent without a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from core.progress import ProgressBars, no_progress

ROOT = Path(__file__).resolve().parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What is left to see on the current line."""
        return self.getvalue().rpartition("\r")[2].strip()


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest puts its own stderr in place after fixtures."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_one_bar_at_a_time_with_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    bars = ProgressBars()
    bars("downloading a", 0, 0)
    assert "downloading a" in terminal.getvalue()
    bars("weights", 5, 10)
    assert "weights" in terminal.screen() and "50%" in terminal.screen()
    bars("weights", 10, 10)
    assert terminal.screen() == ""


def test_a_thing_that_is_done_twice_is_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process loads its weights again when it is restarted."""
    terminal = shown_on(monkeypatch)
    bars = ProgressBars()
    for _ in range(2):
        before = len(terminal.getvalue())
        bars("weights", 1, 2)
        assert "weights" in terminal.getvalue()[before:]
        bars("weights", 2, 2)
        assert terminal.screen() == ""


def test_the_next_thing_ends_a_bar_that_never_came_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    bars = ProgressBars()
    bars("weights", 7, 8)
    assert "weights" in terminal.screen()
    bars("start", 1, 1)
    assert terminal.screen() == ""
    bars.close()
    no_progress("weights", 1, 2)
    assert terminal.screen() == ""


def test_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars()
    bars("weights", 1, 2)
    bars("weights", 2, 2)
    bars.close()
    assert capfd.readouterr().err == ""


def test_the_type_costs_no_import() -> None:
    code = "import sys, core.progress; print('tqdm' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]
