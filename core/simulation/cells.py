"""Runs of the simulator side by side: jobs and their figures go through pipes as JSON, one per line."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import NonetError, described
from core.process import collect_rarely
from core.simulation import metrics
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.keys import checked
from core.simulation.load import at_load, capacity
from core.simulation.loop import simulate
from core.simulation.metrics import Slo
from core.simulation.records import Floats, Outcomes, RunResult
from core.simulation.report import latencies
from core.simulation.traffic import TrafficSettings, open_traffic

NUM_POINTS = 101  # of a distribution


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or the search for what the machine can do of this traffic."""

    traffic: dict[str, Any]  # of TrafficSettings
    overrides: tuple[str, ...] = ()
    cost: str = "gpu"
    slo: tuple[float, float] = (1.0, 0.1)  # TTFT and TPOT, in seconds
    focus: tuple[str, ...] = ()  # tenants whose latencies are of interest; none: all of them
    asks_for: Literal["figures", "capacity"] = "figures"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a job found. Times in seconds; `problem`: it failed, and the figures mean nothing."""

    values: dict[str, float] = {}
    curves: dict[str, list[float]] = {}  # NUM_POINTS quantiles, evenly spaced
    problem: str = ""


def work(job: Job) -> Figures:
    """In this process."""
    try:
        traffic = checked(TrafficSettings, job.traffic)
        settings = SimulationSettings(cost=job.cost)
        if job.asks_for == "capacity":
            return Figures(values={"capacity": capacity(traffic, job.overrides, settings)})
        source = open_traffic(at_load(traffic, job.overrides, settings))
        result = simulate(open_simulation(job.overrides, settings, source.shares_content), source)
        return figures(result, Slo(*job.slo), job.focus)
    except Exception as error:  # a scheduler may raise anything; the table says so and goes on
        return Figures(problem=described(error))


def figures(result: RunResult, slo: Slo, focus: Sequence[str] = ()) -> Figures:
    outcomes, steps = result.outcomes, result.steps
    fairness = metrics.fairness(outcomes)
    num = max(len(outcomes), 1)
    values = {
        **_latencies(outcomes, outcomes.served, ""),
        "jain": fairness.jain,
        "least_share": fairness.least,
        "goodput": metrics.goodput(outcomes, slo),
        "slo_share": float(slo.met(outcomes).sum()) / num,
        "served_share": float(outcomes.served.sum()) / num,
        "preemptions": steps.num_preemptions / num,
        "kv_waste": result.kv_waste,
        "kv_use": metrics.kv_use(result),
        "cached_share": metrics.cached_share(outcomes),
        "wall_s": result.wall_s,
    }
    curves = {"ttft_s": _curve(outcomes.ttft_s), "e2e_s": _curve(outcomes.e2e_s[outcomes.served])}
    if focus:
        wanted = [index for index, name in enumerate(outcomes.tenants) if name in focus]
        rows = outcomes.served & np.isin(outcomes.tenant, wanted)
        values |= _latencies(outcomes, rows, "focus_")
        curves["focus_e2e_s"] = _curve(outcomes.e2e_s[rows])
    return Figures(values=values, curves=curves)


def _latencies(outcomes: Outcomes, rows: NDArray[np.bool_], prefix: str) -> dict[str, float]:
    """mean and p99 of each; NaN where nobody was served."""
    return {
        f"{prefix}{word}_{name}": summary.get(word, float("nan"))
        for name, summary in latencies(outcomes, rows).items()
        for word in ("mean", "p99")
    }


def _curve(values: Floats) -> list[float]:
    finite = values[np.isfinite(values)]
    return [float(v) for v in np.quantile(finite, np.linspace(0, 1, NUM_POINTS))] if len(finite) else []


# Side by side


def run_jobs(jobs: Sequence[Job], num_workers: int, on_done: Callable[[], object] = lambda: None) -> list[Figures]:
    """In the order of the jobs. With one worker in this process, else each worker is a process of its own."""
    found: dict[int, Figures] = {}
    left = deque(enumerate(jobs))
    if num_workers == 1:
        for index, job in left:
            found[index] = work(job)
            on_done()
    else:
        with ThreadPoolExecutor(num_workers) as threads:
            for ended in [threads.submit(_drive, left, found, on_done) for _ in range(min(num_workers, len(jobs)))]:
                ended.result()
    return [found[index] for index in range(len(jobs))]


def _drive(left: deque[tuple[int, Job]], found: dict[int, Figures], on_done: Callable[[], object]) -> None:
    """Hand one worker a job after the other, as long as there are any."""
    command = [sys.executable, "-m", "core.simulation.cells"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        while left:
            try:
                index, job = left.popleft()
            except IndexError:  # another worker took it
                break
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                raise NonetError(f"a worker of the table ended with code {child.wait()}; workers=1 shows where")
            found[index] = _decoded(line)
            on_done()


def _decoded(line: bytes) -> Figures:
    """JSON has no NaN: a missing number comes as null."""
    raw = msgspec.json.decode(line)
    values = {name: float("nan") if value is None else value for name, value in raw["values"].items()}
    return Figures(values=values, curves=raw["curves"], problem=raw["problem"])


def main() -> None:
    decoder = msgspec.json.Decoder(Job)
    collect_rarely()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(work(decoder.decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
