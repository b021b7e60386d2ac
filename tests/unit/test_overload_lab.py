"""`core.lab.overload`: its words, and what it makes of what a client saw. Its pieces start servers, and are no tests."""

from __future__ import annotations

import pytest

from core.lab import overload
from core.lab.overload import (
    MAX_RUNNING,
    Call,
    Found,
    Options,
    _gaps,
    _good,
    _told,
    flaws_of_burst,
    flaws_of_gaps,
    flaws_of_goodput,
    flaws_of_probes,
    main,
    parsed,
)


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


@pytest.mark.parametrize(("found", "flaws"), [(Found("a"), 0), (Found("a", ("too few",)), 1)])
def test_the_exit_code_is_that_of_the_pieces(
    found: Found, flaws: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def piece(options: Options, folder: object) -> Found:
        return found

    monkeypatch.setattr(overload, "PIECES", {"good": lambda *_: _good_piece(), "piece": piece})
    assert main([]) == flaws
    assert main(["good"]) == 0
    assert capsys.readouterr().out.count("FAILED: too few") == flaws


async def _good_piece() -> Found:
    return Found("well")


def served(count: int) -> list[Call]:
    return [Call(0.0, 200, [1.0], 2.0, whole=True)] * count


def refused(count: int, after: float = 0.05) -> list[Call]:
    return [Call(0.0, 503, [], after)] * count


def test_goodput_past_what_it_can_do_is_nine_tenths_of_that_at_it() -> None:
    assert flaws_of_goodput({1.0: 10.0, 1.5: 9.0}) == [] and flaws_of_goodput({1.0: 10.0, 1.5: 12.0}) == []
    assert flaws_of_goodput({1.0: 10.0, 1.5: 8.9}) == ["goodput at 1.5x is 8.90/s, and must be 9.00/s"]
    assert flaws_of_goodput({1.0: 0.0, 1.5: 0.0}) == ["nothing was served in time at 1.0x"]


def test_of_a_burst_a_queue_full_is_served_and_all_others_are_refused_and_counted() -> None:
    options = Options(burst=10, queue=4)
    assert flaws_of_burst(0, [*served(4), *refused(6)], 6, options) == []
    assert flaws_of_burst(0, [*served(7), *refused(3)], 3, options) == []
    assert flaws_of_burst(0, served(3), 0, options) == []
    assert flaws_of_burst(1, [*served(4), *refused(6)], 5, options) == [
        "round 1: clients saw 6 refusals, and the server counted 5"
    ]
    assert "3 were served" in flaws_of_burst(0, [*served(3), *refused(7)], 7, options)[0]
    lost = Call(0.0, error="ReadError")
    assert (
        "1 calls were neither served nor refused" in flaws_of_burst(0, [*served(4), *refused(5), lost], 5, options)[0]
    )


def test_a_refusal_comes_within_a_tenth_of_a_second() -> None:
    assert flaws_of_probes([*refused(200), *served(1)]) == []
    assert flaws_of_probes([*refused(100), *refused(5, 0.3)]) == ["a refusal took 300 ms (p99), 100 at most"]
    assert flaws_of_probes(served(2)) == ["no call was refused by the full queue"]


def test_half_of_the_gaps_beside_a_long_prompt_keep_to_the_target() -> None:
    assert flaws_of_gaps([0.02] * 6 + [0.2] * 5, 0.02) == []
    (flaw,) = flaws_of_gaps([0.02] * 5 + [0.2] * 6, 0.02)
    assert "200.0 ms" in flaw and "20.0 ms" in flaw
    assert flaws_of_gaps([], 0.02) == ["no stream had a token while the prompt was computed"]
