"""What `core.lab.check_scheduling` takes for a promise that is kept, and what it says when one is not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from core.lab import check_scheduling
from core.lab.check_scheduling import PIECES, Bench, cost, kv_waste, million, policies, run, simulator
from core.lab.scheduling_cost import Growth, MeasuredCost, measure, step_cost
from core.simulation.cells import Figures
from core.simulation.scenarios import CONTENDERS, SCENARIOS
from core.simulation.table_rows import Row, Table

KEPT = {
    "latency": 5.0,
    "srtf": 0.8,
    "fcfs_jain": 0.7,
    "fair_jain": 0.97,
    "sliced": 1.0,
    "slices": 6.0,
    "goodput": 4.8,
    "waste": 0.03,
    "static": 0.2,
}


def table(problem: str = "", **changed: float) -> Table:
    """Three seeds of every row, all alike but for what is being claimed."""
    figures = {**KEPT, **changed}
    rows = []
    for scenario in SCENARIOS:
        for load in scenario.loads:
            taken = [one for one in CONTENDERS if scenario.takes(one)]
            runs = {
                one.name: tuple(_run(scenario.name, load, one.name, seed, figures, problem) for seed in range(3))
                for one in taken
            }
            rows += [Row(scenario, load, one, runs[one.name], runs["fcfs"]) for one in taken]
    return Table(tuple(rows), {scenario.name: 5.0 for scenario in SCENARIOS})


def _run(scenario: str, load: float, name: str, seed: int, figures: Mapping[str, float], problem: str) -> Figures:
    latency = (figures["latency"] + seed) * (figures["srtf"] + 0.01 * seed if name == "srtf" else 1.0)
    return Figures(
        values={
            "mean_e2e_s": latency,
            "mean_ttft_s": latency / 2,
            "jain": figures["fair_jain"] if name == "fair" else figures["fcfs_jain"],
            "focus_p99_ttft_s": figures["sliced"] if name == "time_slice" else 7.0,
            "focus_p99_e2e_s": figures["slices"] if name == "time_slice 100" else 8.0,
            "goodput": figures["goodput"] if load > 1 else 5.0,
            "kv_waste": figures["static"] if name == "static" else figures["waste"],
        },
        problem=problem if name == "slo" else "",
    )


def outcome(monkeypatch, piece, size="full", **changed):
    monkeypatch.setattr(check_scheduling, "make_table", lambda settings: table(**changed))
    return piece(Bench(size))


def test_all_promises_kept(monkeypatch, capsys):
    found = outcome(monkeypatch, policies)
    assert found.good
    for words in (
        "srtf latency -19.0%",
        "fair Jain 0.970 (fcfs 0.700)",
        "time_slice short p99 TTFT 1.00 s (fcfs 7.00), latency 6.00 s",
        "keeps 96% at 1.5x of its goodput at 1x",
    ):
        assert words in found.figures
    assert "conversation at 1.5x load" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        {"srtf": 0.99},
        {"srtf": 1.2},
        {"fair_jain": 0.94},
        {"sliced": 8.0},
        {"slices": 8.5},
        {"goodput": 4.4},
        {"problem": "RuntimeError: no"},
    ],
)
def test_one_promise_broken_fails_the_piece(monkeypatch, capsys, changed):
    assert not outcome(monkeypatch, policies, **changed).good


def test_a_failed_row_is_named(monkeypatch, capsys):
    found = outcome(monkeypatch, policies, problem="RuntimeError: no")
    assert "first slo: RuntimeError: no" in found.figures


def test_few_requests_need_not_show_it(monkeypatch, capsys):
    assert outcome(monkeypatch, policies, "quick", fair_jain=0.9, sliced=8.0).good
    assert not outcome(monkeypatch, policies, "quick", srtf=1.2).good


def test_kv_waste_is_that_of_the_worst_load(monkeypatch, capsys):
    found = outcome(monkeypatch, kv_waste)
    assert found.good and found.figures == "KV waste 3.00% (static 20.00%)"
    assert not outcome(monkeypatch, kv_waste, waste=0.05).good
    assert not outcome(monkeypatch, kv_waste, static=0.02).good


def test_a_million_is_counted(monkeypatch, capsys):
    monkeypatch.setitem(check_scheduling.NUM_SIMULATED, "quick", 200)
    found = million(Bench("quick"))
    assert found.good and found.figures.startswith("200 requests simulated in")


def test_the_last_line_and_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(check_scheduling, "make_table", lambda settings: table(waste=0.05))
    assert run(["kv_waste"]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("scheduling FAILED in") and "FAILED: KV waste 5.00% (static 20.00%)" in last
    assert run(["--quick", "kv_waste"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("scheduling ok in") and last.endswith("; without its bounds: KV waste below 4%")


def test_a_quick_run_says_which_bounds_it_leaves_out_and_a_full_one_leaves_out_none(monkeypatch, capsys):
    found = outcome(monkeypatch, policies, "quick", fair_jain=0.9)
    assert set(found.left_out) == {
        "srtf's interval on conversation below 0",
        "srtf's interval on code below 0",
        "fair Jain at least 0.95",
        "time_slice short p99 below fcfs",
        "load_aware keeps at least 90%",
    }
    assert not outcome(monkeypatch, policies, "full").left_out
    monkeypatch.setattr("core.lab.scheduling_cost.measure", measured())
    assert cost(Bench("quick")).left_out == (
        "R² at least 0.98",
        "scheduling at most 0.5 ms at 256",
        "scheduling at most 2 ms at 2,000",
        "batch building at most 4 ms at 2,000",
    )
    assert not cost(Bench("full")).left_out


@pytest.mark.parametrize(("size", "good"), [("quick", True), ("full", False)])
def test_a_simulator_that_is_far_off_is_no_failure_of_a_quick_run_which_says_so(monkeypatch, capsys, size, good):
    sides = dict.fromkeys(("mean_ttft_s", "mean_tpot_s", "mean_e2e_s", "output_tokens_per_s"), 1.0)
    found = {
        "real": sides,
        "simulated": sides,
        "errors": {**dict.fromkeys(sides, 0.0), "mean_ttft_s": 1.48},
        "requests": 20,
        "offered_requests_per_s": 1.0,
        "steps": {"real": 1, "simulated": 1},
        "step_error": 0.0,
        "doubt": "warning: the fit is off",
    }
    monkeypatch.setattr("core.simulation.compare.compare", lambda *asked: found)
    outcome = simulator(Bench(size))
    assert outcome.good is good and "off by +148.0% in mean TTFT" in outcome.figures
    assert outcome.left_out == (("simulator off by at most 15%",) if size == "quick" else ())
    assert "warning: the fit is off" in capsys.readouterr().out


def test_an_unknown_piece_is_named(capsys):
    assert run(["--quick", "kv_wast"]) == 2
    assert "did you mean kv_waste?" in capsys.readouterr().err


def test_every_piece_says_what_it_is():
    assert set(PIECES) == {"cost", "kv_waste", "policies", "simulator", "million"}
    assert all((piece.__doc__ or "").strip() for piece in PIECES.values())


def test_the_table_is_made_once_for_all_that_read_it(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(check_scheduling, "make_table", lambda settings: asked.append(settings) or table())
    assert run(["--quick", "kv_waste", "policies"]) == 0
    assert [one.policies for one in asked] == [""]
    assert run(["--quick", "kv_waste"]) == 0
    assert [one.policies for one in asked] == ["", "static"]


def measured(build_ms=1.0, **slow):
    costs = [
        MeasuredCost(n, 0.0005 * n + slow.get(f"at_{n}", 0.0), 0.0, build_ms * n / 2000) for n in (64, 256, 1024, 2000)
    ]
    return lambda: (costs, Growth.of(costs))


@pytest.mark.parametrize(("found", "good"), [({}, True), ({"build_ms": 4.5}, False), ({"at_2000": 1.5}, False)])
def test_costs_are_held_against_their_limits(monkeypatch, capsys, found, good):
    monkeypatch.setattr("core.lab.scheduling_cost.measure", measured(**found))
    outcome = cost(Bench("full"))
    assert outcome.good is good and "batch building" in outcome.figures
    assert cost(Bench("quick")).good


def test_a_cost_is_the_least_of_its_rounds(monkeypatch):
    rounds = {
        8: [(1.0, 2.0, 3.0), (9.0, 4.0, 4.0), (2.0, 8.0, 1.0)],
        16: [(5.0, 5.0, 5.0), (6.0, 4.0, 6.0), (7.0, 7.0, 3.0)],
    }
    sizes = []

    def step_cost(size, make):
        sizes.append(size)
        return MeasuredCost(size, *rounds[size].pop())

    monkeypatch.setattr("core.lab.scheduling_cost.step_cost", step_cost)
    costs, _ = measure((8, 16))
    assert sizes == [8, 16] * 3
    assert costs[0] == MeasuredCost(8, 1.0, 2.0, 1.0) and costs[1] == MeasuredCost(16, 5.0, 4.0, 3.0)


def test_a_scheduler_that_reserves_whole_answers_is_measured_too():
    """No time is looked at: that it ends, with every request decoding in every step that counts."""
    from plugins.schedulers.static import Static

    found = step_cost(6, lambda settings, context: Static(Static.Settings(**settings.model_dump()), context), 3)
    assert found.num_running == 6 and found.scheduling_ms > 0
