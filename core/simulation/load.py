"""Offered load as a share of what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.loop import simulate
from core.simulation.records import RunResult
from core.simulation.traces import TRACES
from core.simulation.traffic import TrafficSettings, open_traffic

NUM_SATURATING = 1_000  # requests; several times what runs at once
AT_ONCE = 1e9  # rate of a queue that is full from the start
MIDDLE = (0.2, 0.8)  # of the ends in between the batch is full: neither filling up nor running out


def capacity(traffic: TrafficSettings, overrides: Sequence[str], settings: SimulationSettings) -> float:
    """Requests per second that `fcfs` serves of this traffic when there are always more of them waiting."""
    update: dict[str, Any] = {"load": None, "ttl": None, "num_requests": NUM_SATURATING}
    update |= {"speedup": AT_ONCE} if traffic.workload in TRACES else {"rate": AT_ONCE}
    own = [word for word in overrides if not word.startswith(("scheduler=", "predictor", "admission"))]
    saturated = open_traffic(traffic.model_copy(update=update))
    simulation = open_simulation(
        ["scheduler=fcfs", "admission=open", *_shared(own)], settings, saturated.shares_content
    )
    return throughput(simulate(simulation, saturated))


def throughput(result: RunResult) -> float:
    """Requests per second between the first and the last fifth of the ends."""
    ends = np.sort(result.outcomes.end_s[result.outcomes.served])
    if len(ends) < 2:
        raise ConfigError(
            "load: nothing of this traffic can be served; is the KV pool (cache.num_blocks) large enough?", "load"
        )
    first, last = (int(share * (len(ends) - 1)) for share in MIDDLE)
    first, last = (first, last) if ends[last] > ends[first] else (0, len(ends) - 1)
    return float((last - first) / max(ends[last] - ends[first], 1e-9))


def at_load(traffic: TrafficSettings, overrides: Sequence[str], settings: SimulationSettings) -> TrafficSettings:
    """The same traffic at the rate (of a trace: the speed) that `load` asks for; itself where it asks for nothing."""
    if traffic.load is None:
        return traffic
    return with_rate(traffic, traffic.load * capacity(traffic, overrides, settings))


def with_rate(traffic: TrafficSettings, rate: float) -> TrafficSettings:
    """So many requests per second."""
    if traffic.workload not in TRACES:
        return traffic.model_copy(update={"load": None, "rate": rate})
    times = [arrival.time_s for arrival in open_traffic(traffic.model_copy(update={"load": None, "speedup": 1.0}))]
    if len(times) < 2 or times[-1] <= times[0]:
        raise ConfigError("load: a trace needs two requests at different times to have a rate", "load")
    return traffic.model_copy(update={"load": None, "speedup": rate * (times[-1] - times[0]) / (len(times) - 1)})


def _shared(words: Sequence[str]) -> list[str]:
    """Of the scheduler's own keys those that every scheduler has."""
    every = ("scheduler.max_num_scheduled_tokens=", "scheduler.max_num_running_reqs=", "scheduler.preemption=")
    return [word for word in words if not word.startswith("scheduler.") or word.startswith(every)]
