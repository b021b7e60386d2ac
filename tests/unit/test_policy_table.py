"""The policy table: the same traffic for every policy, means and paired differences that can be checked by hand."""

from __future__ import annotations

import csv
import json
import math
from statistics import NormalDist

import pytest

from core.commands import simulate as command
from core.errors import ConfigError
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.cells import Figures, Job, run_jobs, work
from core.simulation.intervals import T_QUANTILES, relative_change, t_interval
from core.simulation.load import at_load, throughput, with_rate
from core.simulation.loop import simulate
from core.simulation.scenarios import CONTENDERS, OVERLOAD, SCENARIOS, Contender, Scenario, contenders, scenarios
from core.simulation.table import TableSettings, make_table
from core.simulation.table_rows import Row, Table
from core.simulation.table_text import as_records, as_text
from core.simulation.traffic import TrafficSettings, open_traffic

TINY = ["size=tiny", "workers=1", "num_requests=40", "policies=srtf", "scenarios=code"]


def test_t_interval_of_known_values():
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.high) == (2.0, pytest.approx(2.0 + 4.303 / math.sqrt(3)))
    assert found.excludes_zero is False
    assert t_interval([5.0, 5.1, 4.9, 5.0]).excludes_zero
    assert t_interval([7.0]).low == -math.inf
    assert t_interval([0.1] * 50).mean == pytest.approx(0.1)


def test_t_quantiles_fall_towards_the_normal_one():
    assert list(T_QUANTILES) == sorted(T_QUANTILES, reverse=True)
    assert len(T_QUANTILES) == 30
    assert T_QUANTILES[-1] > NormalDist().inv_cdf(0.975)


def test_changes_are_those_of_pairs():
    found = relative_change([5.0, 50.0, 500.0], [10.0, 100.0, 1000.0])
    assert (found.mean, found.low, found.high) == (-0.5, -0.5, -0.5)
    assert str(found) == "-50.0% [-50.0%, -50.0%]"


def run(words):
    return command.run(["table", *words])


def row(values: list[float], baseline: list[float]) -> Row:
    runs, base = ([Figures(values={"mean_e2e_s": value}) for value in each] for each in (values, baseline))
    return Row(SCENARIOS[0], 0.5, CONTENDERS[1], tuple(runs), tuple(base))


def test_a_row_has_means_and_leaves_out_what_is_not_known():
    found = row([1.0, float("nan"), 3.0], [2.0, 2.0, 6.0])
    assert found.mean("mean_e2e_s") == 2.0
    assert found.change("mean_e2e_s").mean == -0.5
    assert math.isnan(found.mean("nothing"))


def test_rows_are_what_is_installed_and_other_peoples_schedulers_come_last():
    found = contenders(["fcfs", "fair", "acme"], [])
    assert [one.name for one in found] == ["fcfs", "fair", "load_aware", "acme"]
    assert found[-1].words == ("scheduler=acme",)
    assert [one.name for one in contenders(["fcfs", "fair", "acme"], ["acme"])] == ["fcfs", "acme"]
    with pytest.raises(ConfigError, match="did you mean fair"):
        contenders(["fcfs", "fair"], ["fare"])
    with pytest.raises(ConfigError, match="no block of the table"):
        scenarios(["nowhere"])


def test_every_scenario_is_legal_traffic():
    for scenario in SCENARIOS:
        open_traffic(TrafficSettings.model_validate({**scenario.traffic, "rate": 1.0}))
        assert set(scenario.contenders) <= {one.name for one in CONTENDERS}


def test_other_peoples_policies_run_in_every_scenario():
    limited = next(one for one in SCENARIOS if one.contenders)
    assert limited.takes(Contender("acme", "acme"))
    assert not limited.takes(next(one for one in CONTENDERS if one.name not in limited.contenders))


def test_other_peoples_policies_have_a_row_where_admission_is_compared_too():
    rows = contenders(["fcfs", "acme"], [])
    taken = [one.name for one in rows if OVERLOAD.takes(one)]
    assert taken == ["fcfs", "load_aware", "acme"]


def of_seeds(*seeds: int, name: str = "overload") -> str:
    scenario = next(one for one in SCENARIOS if one.name == name)
    run = Figures(values={"mean_e2e_s": 2.0, "served_share": 0.5})
    runs = tuple(run for _ in seeds)
    rows = tuple(Row(scenario, 1.0, one, runs, runs) for one in CONTENDERS)
    return as_text(Table(rows, {name: 2.0}, 40))


def test_the_legend_says_what_figures_rest_on_and_what_words_mean():
    shown = of_seeds(0, 1, 2, name="flood")
    for words in (
        "each cell: the mean of 3 runs of 40 requests, with the seeds 0, 1, 2",
        "their (in flood): of the tenants t1, t2, t3, t4, t5, t6, t7",
        "time_slice 100: scheduler=time_slice scheduler.num_iterations=100",
        "load_aware: scheduler=fcfs admission=load_aware",
        "with a 95% interval",
    ):
        assert words in shown
    assert "proves nothing" not in shown and "served" not in shown


def test_where_requests_expire_the_table_says_how_many_were_served():
    shown = of_seeds(0, 1, 2)
    assert "served" in shown.splitlines()[1] and "50.0%" in shown
    assert "served: share of the requests" in shown and "their (in" not in shown


@pytest.mark.parametrize(
    ("seeds", "says", "interval"),
    [(1, "one seed proves nothing", False), (2, "which proves nothing with two seeds", True), (3, "", True)],
)
def test_few_seeds_prove_nothing(seeds, says, interval):
    shown = of_seeds(*range(seeds))
    assert says in shown and "inf" not in shown
    assert ("+0.0% [" in shown) is interval


def test_what_a_row_says_goes_before_what_the_scenario_says():
    scenario = Scenario("s", "about", {}, (1.0,), overrides=("admission=open", "cache.num_blocks=9"))
    row = Contender("x", "fcfs", ("admission=load_aware",))
    assert scenario.words(row) == ("admission=load_aware", "cache.num_blocks=9", "scheduler=fcfs")
    assert not SCENARIOS[0].takes(next(one for one in CONTENDERS if one.name == "load_aware"))


def test_the_whole_way_to_text_json_and_csv(tmp_path, capsys):
    files = [f"json={tmp_path / 'table.json'}", f"csv={tmp_path / 'table.csv'}"]
    assert run([*TINY, *files]) == 0
    shown = capsys.readouterr().out
    for words in ("code at 0.5x load", "code at 1.5x load", "fcfs", "srtf", "latency against fcfs"):
        assert words in shown
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(one["policy"], one["load"]) for one in rows] == [(p, x) for x in (0.5, 0.9, 1.5) for p in ("fcfs", "srtf")]
    assert all(one["mean_e2e_s"] > one["mean_ttft_s"] > 0 for one in rows)
    assert all(one["p99_slowdown"] >= 1 for one in rows)
    assert all(one["served_share"] == 1 for one in rows)
    with open(tmp_path / "table.csv", encoding="utf-8") as lines:
        assert [line["policy"] for line in csv.DictReader(lines)] == [one["policy"] for one in rows]


def test_the_same_seed_gives_the_same_figures_in_this_process_and_in_workers():
    traffic = {"workload": "code", "num_requests": 30, "rate": 4.0}
    jobs = [
        Job(traffic={**traffic, "seed": seed}, overrides=("scheduler=fcfs", "admission=open")) for seed in (0, 1, 2)
    ]
    here, there = run_jobs(jobs, 1), run_jobs(jobs, 2)
    assert not any(one.problem for one in here)
    for one, other in zip(here, there, strict=True):
        same = {name: value for name, value in one.values.items() if name != "wall_s"}
        assert {name: other.values[name] for name in same} == pytest.approx(same, nan_ok=True)
        assert one.curves == other.curves
    assert here[0].values["mean_e2e_s"] != here[1].values["mean_e2e_s"]


def test_a_policy_that_fails_is_named_in_its_row_and_in_the_exit_code(capsys):
    found = work(Job(traffic={"workload": "code"}, overrides=("scheduler=nobody",)))
    assert "nobody" in found.problem
    scenario = Scenario("s", "about", {}, (1.0,))
    failed = Row(scenario, 1.0, Contender("bad", "bad"), (found,), (found,))
    assert "failed: " in as_text(Table((failed,), {"s": 2.0}))
    assert as_records(Table((failed,), {"s": 2.0}))[0]["problem"] == found.problem


def test_nothing_but_key_value_pairs_is_taken():
    with pytest.raises(ConfigError, match="write key=value"):
        run(["small"])
    with pytest.raises(ConfigError, match="size"):
        run(["size=huge"])
    with pytest.raises(ConfigError, match="a table has its own machine"):
        run(["scheduler=srtf"])
    with pytest.raises(ConfigError, match="no row of the table"):
        make_table(TableSettings(policies="nobody"))


def test_load_one_is_what_fcfs_can_serve():
    words = ["admission=open", "scheduler.max_num_running_reqs=16", "cache.num_blocks=2048"]
    asked = TrafficSettings(workload="fixed", load=1.0, num_requests=200)
    traffic = at_load(asked, words, SimulationSettings())
    assert traffic.load is None and traffic.rate is not None
    source = open_traffic(with_rate(traffic, 10 * traffic.rate))
    served = throughput(simulate(open_simulation(["scheduler=fcfs", *words], None, False), source))
    assert served == pytest.approx(traffic.rate, rel=0.05)
    assert at_load(traffic, words, SimulationSettings()) is traffic


def test_the_load_of_a_trace_is_made_by_its_speed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n" + "".join(f"{i},64,8\n" for i in range(101)))
    trace = TrafficSettings(workload="burstgpt", path=str(path))
    faster = with_rate(trace, 4.0)
    assert faster.speedup == pytest.approx(4.0)
    times = [arrival.time_s for arrival in open_traffic(faster)]
    assert (len(times) - 1) / times[-1] == pytest.approx(4.0)
