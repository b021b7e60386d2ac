"""`core.lab.overload`: its words, and what it makes of what a client saw. Its pieces start servers, and are no tests."""

from __future__ import annotations

import pytest

from core.lab.overload import MAX_RUNNING, Call, Options, _gaps, _good, _told, main, parsed


def test_words_are_pieces_options_and_config() -> None:
    names, options = parsed(["burst", "seconds=3", "tiny=false", "admission.max_queue_time=1", "scheduler=fcfs"])
    assert names == ["burst"]
    assert options == Options(tiny=False, seconds=3, words=("admission.max_queue_time=1", "scheduler=fcfs"))


def test_a_piece_that_does_not_exist_is_told_with_those_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["brust"]) == 2
    assert "did you mean burst" in capsys.readouterr().err


def test_good_are_whole_answers_whose_first_token_came_in_time() -> None:
    options = Options(seconds=2.0, queue_time=1.0)
    calls = [
        Call(0.0, 200, [2.0], 3.0, whole=True),
        Call(0.0, 200, [2.1], 3.0, whole=True),
        Call(0.0, 200, [1.0], 3.0, error="ReadError"),
        Call(0.0, 503, [], 0.1),
    ]
    assert _good(calls, options) == 0.5
    assert _told(calls) == "1 refused after p50 100, p99 100 ms" and MAX_RUNNING > 1


def test_gaps_are_those_that_end_in_the_time_asked_for() -> None:
    assert _gaps([Call(0.0, 200, [1.0, 2.0, 5.0, 6.0])], 2.0, 6.0) == [1.0, 3.0]
