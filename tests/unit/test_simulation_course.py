"""What a long run says of itself where nobody watches a terminal, and what a machine is called."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from core.lab.machine import processor
from core.simulation.course import INTERVAL_S, Course


def test_a_line_now_and_then_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 1.0, INTERVAL_S + 1, INTERVAL_S + 2, 3 * INTERVAL_S])
    with Course("requests", 2000, lambda: next(moments)) as course:
        course.at(10)
        course.at(1500)
        course.add()
        course.at(1900)
    assert capsys.readouterr().err.splitlines() == [
        "1,500 of 2,000 requests after 11 s",
        "1,900 of 2,000 requests after 30 s",
    ]


def test_what_has_no_known_end_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, INTERVAL_S])
    with Course("steps measured", clock=lambda: next(moments)) as course:
        course.at(7)
    assert capsys.readouterr().err == "7 steps measured after 10 s\n"


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Acme 9000\n\nmodel name\t: another\n", encoding="utf-8")
    assert processor(str(path)) == "Acme 9000"
    assert processor(str(tmp_path / "nowhere")) == platform.machine() != ""
