"""What scheduling promises, in figures: `python -m core.lab.check_scheduling [--quick] [PIECE …]`, all pieces without names.

Each piece prints its table; the last line has the figures of all, and the exit code is 1 where one of them fails. `--quick` runs
the same pieces on less, and with a model of a few thousand weights: a smoke test of minutes, in which no time is held against
anyone, and no figure that so few requests cannot show. The last line names the bounds that it leaves out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from core.lab.pieces import Outcome, Size, given, main, sized
from core.process import collect_rarely
from core.simulation.scenarios import BASELINE, CODE, CONVERSATION, FLOOD, LOADS, OVERLOAD, SHORT_UNDER_LONG
from core.simulation.table import TableSettings, make_table
from core.simulation.table_rows import Table
from core.simulation.table_text import as_text

TABLE_SIZES: Mapping[Size, Literal["tiny", "full"]] = {"quick": "tiny", "full": "full"}

HIGH_LOAD = 1.5
MIN_KEPT = 0.9  # of the goodput at 1.0x load, at 1.5x
MIN_JAIN = 0.95  # of `fair` where one of eight tenants floods
PAGED = (BASELINE, "static")  # rows whose KV waste is compared
MAX_KV_WASTE = 0.04  # of `fcfs` on conversations, in blocks of 16
MAX_MS = {256: 0.5, 2000: 2.0}  # of a scheduling step, by requests that run
MAX_BUILD_MS = {2000: 4.0}  # of building its batch
MIN_R_SQUARED = 0.98  # of a straight line through the costs
MAX_ERROR = 0.15  # of the simulator's mean TTFT and throughput
NUM_COMPARED: Mapping[Size, int] = {"quick": 20, "full": 200}
NUM_SIMULATED: dict[Size, int] = {"quick": 20_000, "full": 1_000_000}
MAX_SIMULATION_S = 300.0  # of one core, for a million requests
MILLION = ("scheduler=fcfs", "admission=open", "scheduler.max_num_running_reqs=256")
MILLION_RATE = 5.0  # requests per second


class Bench:
    """How much is done, and the policy table: made once where several of the chosen pieces read it."""

    def __init__(self, size: Size, makes_whole_table: bool = False):
        self.size = size
        self._makes_whole = makes_whole_table

    def table(self, policies: str = "", scenarios: str = "") -> Table:
        """With these rows and blocks at least; the whole one where it is made anyway."""
        if self._makes_whole or not (policies or scenarios):
            return self._whole_table
        return make_table(TableSettings(size=TABLE_SIZES[self.size], policies=policies, scenarios=scenarios))

    @cached_property
    def _whole_table(self) -> Table:
        return make_table(TableSettings(size=TABLE_SIZES[self.size]))


def _held(size: Size, figures: str, bounds: Mapping[str, bool], always: bool = True) -> Outcome:
    """`bounds`: whether each is kept; what so few requests and so short a time cannot show is not held against `quick`."""
    if size == "quick":
        return Outcome(always, figures, tuple(bounds))
    return Outcome(always and all(bounds.values()), figures)


def policies(bench: Bench) -> Outcome:
    """Every policy on the same traffic: what each of them is for shows."""
    table, size = bench.table(), bench.size
    print(as_text(table), flush=True)
    if failed := [row for row in table.rows if row.problem]:
        return Outcome(
            False, f"policies: {len(failed)} rows failed, first {failed[0].contender.name}: {failed[0].problem}"
        )
    claims = [
        _srtf(table, CONVERSATION.name, size),
        _srtf(table, CODE.name, size),
        _fair(table, size),
        _time_slice(table, size),
        _load_aware(table, size),
    ]
    return Outcome(
        all(claim.good for claim in claims),
        ", ".join(claim.figures for claim in claims),
        tuple(bound for claim in claims for bound in claim.left_out),
    )


def _srtf(table: Table, scenario: str, size: Size) -> Outcome:
    """In the tiny table intervals are wide: there its mean has to be better."""
    change = table.row(scenario, HIGH_LOAD, "srtf").change("mean_e2e_s")
    bounds = {f"srtf's interval on {scenario} below 0": change.excludes_zero}
    return _held(size, f"srtf latency {change} on {scenario}", bounds, change.mean < 0)


def _fair(table: Table, size: Size) -> Outcome:
    found, base = (table.row(FLOOD.name, FLOOD.loads[0], name).mean("jain") for name in ("fair", BASELINE))
    bounds = {f"fair Jain at least {MIN_JAIN:g}": found >= MIN_JAIN}
    return _held(size, f"fair Jain {found:.3f} (fcfs {base:.3f})", bounds, base < found)


def _time_slice(table: Table, size: Size) -> Outcome:
    """Short requests wait for slices of the long ones, not for their ends. They start sooner with any slice; that they end sooner
    takes one that is worth the copy of its KV."""
    ttft, base = (_short_p99(table, row, "ttft_s") for row in ("time_slice", BASELINE))
    latency, base_latency = (_short_p99(table, row, "e2e_s") for row in ("time_slice 100", BASELINE))
    figures = (
        f"time_slice short p99 TTFT {ttft:.2f} s (fcfs {base:.2f}), latency {latency:.2f} s (fcfs {base_latency:.2f})"
    )
    return _held(size, figures, {"time_slice short p99 below fcfs": ttft < base and latency < base_latency})


def _short_p99(table: Table, row: str, name: str) -> float:
    return table.row(SHORT_UNDER_LONG.name, SHORT_UNDER_LONG.loads[0], row).mean(f"focus_p99_{name}")


def _load_aware(table: Table, size: Size) -> Outcome:
    low, high = (table.row(OVERLOAD.name, load, "load_aware").mean("goodput") for load in OVERLOAD.loads)
    kept, (less, more) = high / low if low else 0.0, OVERLOAD.loads
    figures = f"load_aware keeps {kept:.0%} at {more:g}x of its goodput at {less:g}x"
    return _held(size, figures, {f"load_aware keeps at least {MIN_KEPT:.0%}": kept >= MIN_KEPT})


def kv_waste(bench: Bench) -> Outcome:
    """KV slots that are allocated and hold nothing, in blocks of 16 on conversations: paging, and the static baseline."""
    table = bench.table("static", CONVERSATION.name)
    rows = {(name, load): table.row(CONVERSATION.name, load, name).mean("kv_waste") for name in PAGED for load in LOADS}
    for load in LOADS:
        print(f"{load:g}x load   fcfs {rows[BASELINE, load]:6.2%}   static {rows['static', load]:6.2%}")
    worst, static = (max(rows[name, load] for load in LOADS) for name in PAGED)
    bounds = {f"KV waste below {MAX_KV_WASTE:.0%}": worst < MAX_KV_WASTE}
    return _held(bench.size, f"KV waste {worst:.2%} (static {static:.2%})", bounds, static > worst)


def cost(bench: Bench) -> Outcome:
    """What a step costs the scheduler, that it grows in a straight line, and what its batch costs."""
    from core.lab.scheduling_cost import measure, report

    costs, growth = measure()
    print(report(costs, growth))
    found = {one.num_running: one for one in costs}
    bounds = {f"R² at least {MIN_R_SQUARED:g}": growth.r_squared >= MIN_R_SQUARED}
    for number, most in MAX_MS.items():
        bounds[f"scheduling at most {most:g} ms at {number:,}"] = found[number].scheduling_ms <= most
    for number, most in MAX_BUILD_MS.items():
        bounds[f"batch building at most {most:g} ms at {number:,}"] = found[number].build_ms <= most
    figures = [f"{found[number].scheduling_ms:.2f} ms at {number:,} running" for number in MAX_MS]
    figures += [f"batch building {found[number].build_ms:.2f} ms at {number:,}" for number in MAX_BUILD_MS]
    return _held(bench.size, f"scheduling {', '.join(figures)}, R² {growth.r_squared:.3f}", bounds)


def simulator(bench: Bench) -> Outcome:
    """The same requests through the real engine on this machine and through the simulator."""
    from core.simulation.compare import CompareSettings, compare, error, text

    num = NUM_COMPARED[bench.size]
    with tempfile.TemporaryDirectory() as folder:
        if bench.size == "full":
            # One thread: the front shares the process, and its work is no term of a step's cost.
            found = compare(["+preset=chat", "executor.num_threads=1"], CompareSettings(num_requests=num))
        else:
            from core.testing.tiny_models import make_tiny_model

            source = f"model.source={make_tiny_model(Path(folder) / 'tiny')}"
            found = compare([source], CompareSettings(num_requests=num, fit_seconds=5))
    print("\n".join(filter(None, (text(found), found["doubt"]))))
    ttft, throughput = found["errors"]["mean_ttft_s"], found["errors"]["output_tokens_per_s"]
    figures = f"simulator off by {ttft:+.1%} in mean TTFT and {throughput:+.1%} in throughput"
    return _held(bench.size, figures, {f"simulator off by at most {MAX_ERROR:.0%}": error(found) <= MAX_ERROR})


def million(bench: Bench) -> Outcome:
    """How long a million requests take to simulate, on one core."""
    from core.simulation.build import SimulationSettings, open_simulation
    from core.simulation.loop import simulate
    from core.simulation.traffic import TrafficSettings, open_traffic

    num = NUM_SIMULATED[bench.size]
    traffic = open_traffic(TrafficSettings(workload="conversation", num_requests=num, rate=MILLION_RATE))
    simulation = open_simulation(MILLION, SimulationSettings(stride=256), traffic.shares_content)
    collect_rarely()
    before, started = time.process_time(), time.perf_counter()
    result = simulate(simulation, traffic)
    seconds, wall = time.process_time() - before, time.perf_counter() - started
    print(
        f"{num:,} requests in {result.steps.num_steps:,} steps and {result.steps.num_plans:,} plans: "
        f"{result.simulated_s:,.0f} s simulated in {wall:.1f} s, {seconds:.1f} s of one core"
    )
    whole = int(result.outcomes.served.sum()) == num
    bounds = {f"a million requests in at most {MAX_SIMULATION_S:.0f} s": seconds <= MAX_SIMULATION_S}
    return _held(bench.size, f"{num:,} requests simulated in {seconds:.0f} s", bounds, whole)


PIECES: Mapping[str, Callable[[Bench], Outcome]] = {
    piece.__name__: piece for piece in (cost, kv_waste, policies, simulator, million)
}


def run(arguments: Sequence[str]) -> int:
    names, size = sized(arguments)
    bench = Bench(size, makes_whole_table=not names or policies.__name__ in names)
    return main(names, given(PIECES, bench), "scheduling")


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
