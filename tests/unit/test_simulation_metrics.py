"""What the figures of a run mean, on runs small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.simulation import metrics
from core.simulation.metrics import Slo
from core.simulation.records import Finish, Outcomes, RunResult, StepTotals, Timeline
from core.simulation.report import TOO_SHORT, ReportSettings, report, text

NAN = float("nan")


def outcomes(rows: list[tuple[float, float, float, float, int, int, str]], **columns: object) -> Outcomes:
    """(arrival, scheduled, first token, end, prompt, output, tenant) per request."""
    tenants = tuple(dict.fromkeys(row[6] for row in rows))
    times = np.array([row[:4] for row in rows], np.float64).T
    lengths = np.array([row[4:6] for row in rows], np.int64).T
    zeros = np.zeros(len(rows), np.int64)
    given = {
        "arrival_s": times[0],
        "scheduled_s": times[1],
        "first_token_s": times[2],
        "end_s": times[3],
        "num_prompt_tokens": lengths[0],
        "num_output_tokens": lengths[1],
        "num_cached_tokens": zeros,
        "num_preemptions": zeros,
        "finish": zeros,
        "tenant": np.array([tenants.index(row[6]) for row in rows]),
        "tenants": tenants,
    }
    return Outcomes(**{**given, **columns})  # type: ignore[arg-type]


def result(found: Outcomes, steps: StepTotals | None = None) -> RunResult:
    nothing = np.zeros(0)
    timeline = Timeline(nothing, nothing.astype(np.int64), nothing.astype(np.int64), nothing)
    end = float(np.nanmax(found.end_s))
    return RunResult(found, steps or StepTotals(), timeline, simulated_s=end, wall_s=0.5, num_kv_slots=100)


def test_max_min_division():
    def shares(demands: list[float], capacity: float, weights: list[float] | None = None) -> list[float]:
        given = None if weights is None else np.array(weights)
        return metrics.max_min_shares(np.array(demands, np.float64), capacity, given).tolist()

    assert shares([1, 2, 10], 9) == [1, 2, 6]
    assert shares([5, 5, 5], 9) == [3, 3, 3]
    assert shares([1, 2, 3], 9) == [1, 2, 3]
    assert shares([0, 8, 8], 6) == [0, 3, 3]
    assert shares([9, 9, 1], 10, [2, 1, 1]) == [6, 3, 1]
    assert shares([4, 4], 0) == [0, 0]


def test_jain_index():
    assert metrics.jain(np.array([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert metrics.jain(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert metrics.jain(np.zeros(3)) == 1.0


def test_service_counts_evenly_between_the_moments_of_a_request():
    found = outcomes([(0, 1, 3, 7, 100, 40, "a"), (0, NAN, NAN, 5, 100, 0, "a")])
    assert [metrics.served_until(found, t)[0] for t in (0.5, 2, 3, 5, 9)] == pytest.approx([0, 50, 100, 140, 180])
    assert metrics.served_until(found, 9)[1] == 0


def flooded(got: dict[str, float]) -> Outcomes:
    """Eight tenants in 100 s: t0 asks for 800 prompt tokens, each other one for 50, and gets so many of them by then."""
    rows = []
    for name, amount in got.items():
        wanted = 800 if name == "t0" else 50
        start = 100 - amount  # it is served one prompt token a second, and not yet through at 100 s
        rows.append((0.0, start, start + wanted, start + wanted + 1, wanted, 0, name))
    rows.append((100.0, 2000.0, 2001.0, 2002.0, 0, 0, "t0"))
    return outcomes(rows)


def test_fcfs_with_a_flooding_tenant_is_unfair_and_a_fair_division_is_not():
    # 230 tokens of service for 800 + 7 x 50 = 1,150 asked for: fcfs gives everybody a fifth, max-min a fair eighth.
    polite = [f"t{index}" for index in range(1, 8)]
    fcfs = metrics.fairness(flooded({"t0": 160, **dict.fromkeys(polite, 10)}))
    fair = metrics.fairness(flooded({"t0": 230 / 8, **dict.fromkeys(polite, 230 / 8)}))
    assert fair.jain == pytest.approx(1.0)
    assert fair.least == pytest.approx(1.0)
    assert fcfs.jain < 0.5
    assert fcfs.least == pytest.approx(10 / (230 / 8))


def test_whoever_asks_for_less_than_its_share_and_gets_it_is_treated_fairly():
    found = outcomes(
        [(0, 0, 10, 10.5, 10, 0, "small"), (0, 0, 100, 101, 100, 0, "big"), (100, 200, 201, 202, 0, 0, "big")]
    )
    assert metrics.fairness(found).jain == pytest.approx(1.0)


def test_weights_of_tenants_count():
    rows = [(0, 0, 100, 101, 100, 0, "a"), (0, 0, 50, 51, 50, 0, "b"), (100, 0, 500, 501, 500, 0, "b")]
    found = outcomes(rows)
    got = np.array([100.0, 50.0 + 100.0])
    assert metrics.fairness(found, {"a": 2.0, "b": 3.0}).shares == pytest.approx(got / (250 * np.array([0.4, 0.6])))


def test_goodput_counts_who_kept_both_bounds_over_the_arrival_window():
    found = outcomes(
        [
            (0, 0, 1, 3, 10, 3, "a"),  # TTFT 1, TPOT 1
            (0, 0, 1, 9, 10, 3, "a"),  # TPOT 4
            (2, 2, 5, 6, 10, 2, "a"),  # TTFT 3
            (4, 4, 5, 5, 10, 1, "a"),  # one token has no TPOT
            (4, NAN, NAN, 5, 10, 0, "a"),  # refused
        ],
        finish=np.array([0, 0, 0, 0, Finish.REFUSED]),
    )
    assert Slo(2.0, 2.0).met(found).tolist() == [True, False, False, True, False]
    assert metrics.goodput(found, Slo(2.0, 2.0)) == pytest.approx(2 / 4)


def test_slowdown_is_latency_over_latency_alone():
    found = outcomes([(0, 0, 1, 4, 10, 3, "a"), (1, 1, 2, 3, 10, 1, "a")], solo_s=np.array([2.0, NAN]))
    assert metrics.slowdown(found)[0] == 2.0
    assert np.isnan(metrics.slowdown(found)[1])
    assert np.isnan(metrics.slowdown(outcomes([(0, 0, 1, 4, 10, 3, "a")]))).all()


def test_summary_leaves_out_what_never_came():
    assert metrics.summary(np.array([NAN, 1.0, 3.0])) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.8,
        "p99": pytest.approx(2.98),
        "max": 3.0,
    }
    assert metrics.summary(np.array([NAN])) == {}


def test_a_report_and_its_text():
    found = outcomes(
        [(0, 0, 1, 3, 10, 3, "a"), (1, 2, 3, 5, 30, 2, "b"), (2, NAN, NAN, 4, 10, 0, "b")],
        finish=np.array([0, 0, Finish.EXPIRED]),
        num_cached_tokens=np.array([5, 0, 0]),
        num_preemptions=np.array([0, 2, 0]),
        solo_s=np.array([1.5, 2.0, NAN]),
    )
    steps = StepTotals(
        num_steps=9, num_plans=9, busy_s=4.0, running_s=6.0, num_preemptions=2, kv_allocated_s=200, kv_used_s=190
    )
    figures = report(result(found, steps), ReportSettings(slo_ttft=1.5, slo_tpot=1.5))
    assert figures["requests"] == {"all": 3, "served": 2, "refused": 0, "expired": 1, "error": 0}
    assert figures["ttft_s"]["mean"] == 1.5
    assert figures["slowdown"]["max"] == 2.0
    assert figures["goodput"]["requests_per_s"] == 0.5
    assert figures["kv"] == {"slots": 100, "use": 0.5, "waste": pytest.approx(0.05), "cached_share": pytest.approx(0.1)}
    assert figures["preemptions"]["requests"] == 1
    assert list(figures["tenants"]) == ["a", "b"]
    lines = text(figures)
    for words in ("3: 2 served, 1 expired", "Jain index", "5.00% of those unused", "TTFT p99", "2 of 1 requests"):
        assert words in lines


def test_a_report_of_a_run_that_served_nobody():
    found = outcomes([(0, NAN, NAN, 1, 10, 0, "a")], finish=np.array([Finish.REFUSED]))
    figures = report(result(found), ReportSettings())
    assert figures["ttft_s"] == {}
    assert "1: 1 refused" in text(figures)
    assert figures["fairness"] == {"jain": None, "least_share": None}
    assert "Jain index (nobody was served)" in text(figures)


def test_a_trace_of_one_request_has_no_rates_and_no_fairness():
    figures = report(result(outcomes([(0, 0, 1, 3, 10, 3, "a")])), ReportSettings(slo_tpot=1))
    assert figures["fairness"] == {"jain": None, "least_share": None}
    shown = text(figures)
    assert f"offered {TOO_SHORT}, of these served {TOO_SHORT}" in shown
    assert f"goodput      {TOO_SHORT}, 100.0%" in shown and f"Jain index {TOO_SHORT}" in shown


def test_no_more_is_good_than_is_served_and_no_more_served_than_offered():
    """The queue that is left when arrivals end makes none of them smaller than another."""
    found = outcomes([(float(i), i, i + 1, 300 + i, 10, 3, "a") for i in range(11)])
    rates = report(result(found), ReportSettings(slo_ttft=2, slo_tpot=1000))
    offered, served = (rates["rates"][f"{word}_requests_per_s"] for word in ("offered", "served"))
    assert offered == served == rates["goodput"]["requests_per_s"] == pytest.approx(1.1)


def test_reasons_and_rows_that_were_left_out_are_shown():
    found = replace(
        result(outcomes([(0, NAN, NAN, 1, 10, 0, "a")], finish=np.array([Finish.REFUSED]))),
        reasons={"refused": {"the server is at its limit": 1}},
        left_out={"without an output": 7},
    )
    figures = report(found, ReportSettings())
    assert figures["reasons"] == {"refused": {"the server is at its limit": 1}} and figures["left_out"] == {
        "without an output": 7
    }
    assert "1: the server is at its limit" in text(figures) and "7 rows without an output" in text(figures)
