"""Figures of a run: latencies, slowdown, fairness, goodput, KV use. Definitions are in docs/traffic.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.simulation.records import Finish, Floats, Outcomes, RunResult

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # service per token (Sheng et al., Fairness in Serving LLMs, OSDI 2024)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def summary(values: Floats) -> dict[str, float]:
    """mean, p50, p90, p99 and max of the finite values; empty where there are none."""
    found = values[np.isfinite(values)]
    if not len(found):
        return {}
    quantiles = np.quantile(found, list(QUANTILES.values()))
    return {
        "mean": float(found.mean()),
        **{name: float(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
        "max": float(found.max()),
    }


def slowdown(outcomes: Outcomes) -> Floats:
    """[num_requests] latency over what the request takes alone; NaN where that is not known."""
    if outcomes.solo_s is None:
        return np.full(len(outcomes), np.nan)
    unknown = np.full(len(outcomes), np.nan)
    return np.asarray(np.divide(outcomes.e2e_s, outcomes.solo_s, out=unknown, where=outcomes.solo_s > 0))


# Goodput


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that a client cares for, in seconds."""

    ttft_s: float
    tpot_s: float

    def met(self, outcomes: Outcomes) -> NDArray[np.bool_]:
        """[num_requests] served, with both bounds kept. A request of one token has no TPOT to keep."""
        tpot = outcomes.tpot_s
        in_time = (outcomes.ttft_s <= self.ttft_s) & ((tpot <= self.tpot_s) | np.isnan(tpot))
        return np.asarray(outcomes.served & in_time)


def arrival_window_s(outcomes: Outcomes) -> float:
    """From 0 to the last arrival; rates of requests count by it, so that all policies are divided by the same."""
    return float(outcomes.arrival_s[-1]) if len(outcomes) else 0.0


def goodput(outcomes: Outcomes, slo: Slo) -> float:
    """Requests per second of the arrival window that met the objectives."""
    return _rate(float(slo.met(outcomes).sum()), arrival_window_s(outcomes))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


# Fairness


def served_until(outcomes: Outcomes, moment: float) -> Floats:
    """[num_requests] weighted tokens that each request had got by `moment`.

    A prompt counts evenly between its first step and its first token, an output evenly between first and last token.
    """
    prompt = _progress(outcomes.scheduled_s, outcomes.first_token_s, moment) * outcomes.num_prompt_tokens
    output = _progress(outcomes.first_token_s, outcomes.end_s, moment) * outcomes.num_output_tokens
    return PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output


def _progress(start: Floats, end: Floats, moment: float) -> Floats:
    """How much of [start, end] is over, from 0 to 1; 0 where it never started."""
    length = np.maximum(end - start, 1e-12)
    return np.clip(np.nan_to_num((moment - start) / length, nan=0.0), 0.0, 1.0)


def demanded(outcomes: Outcomes) -> Floats:
    """[num_requests] weighted tokens that were asked for. Of an output that never was, the mean of the others counts."""
    served = outcomes.served
    mean = float(outcomes.num_output_tokens[served].mean()) if served.any() else 0.0
    outputs = np.where(served, outcomes.num_output_tokens, np.maximum(outcomes.num_output_tokens, mean))
    return PROMPT_WEIGHT * outcomes.num_prompt_tokens + OUTPUT_WEIGHT * outputs


def max_min_shares(demands: Floats, capacity: float, weights: Floats | None = None) -> Floats:
    """[n] max-min fair division: nobody gets more than it asks for, and what one leaves is divided among the others, in
    proportion to their weights."""
    weights = np.ones_like(demands) if weights is None else weights
    shares = np.zeros_like(demands)
    open_ = demands > 0
    left = capacity
    while open_.any() and left > 0:
        level = left / weights[open_].sum()
        content = open_ & (demands <= level * weights)
        if not content.any():
            shares[open_] = level * weights[open_]
            break
        shares[content] = demands[content]
        left -= float(demands[content].sum())
        open_ &= ~content
    return shares


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks of what is not empty."""
    return float(np.quantile(values, q))


def jain(shares: Iterable[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, 1984)."""
    values = np.array(list(shares), np.float64)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Fairness:
    """`shares` [num_tenants]: service that each tenant got while requests arrived, over its max-min fair share of the service
    that all of them got. 1 is fair; a tenant that asked for nothing is NaN, and so are all where nobody got anything in that
    time: then the indices are NaN, too."""

    shares: Floats

    @property
    def jain(self) -> float:
        """1 where each tenant has its fair share, whatever it asked for."""
        found = self.shares[np.isfinite(self.shares)]
        return jain(found) if len(found) else float("nan")

    @property
    def least(self) -> float:
        """Of the tenant that came off worst."""
        found = self.shares[np.isfinite(self.shares)]
        return float(found.min()) if len(found) else float("nan")


def fairness(outcomes: Outcomes, weights: Mapping[str, float] | None = None) -> Fairness:
    """`weights`: of tenants, 1 where not named."""
    num = len(outcomes.tenants)
    window = arrival_window_s(outcomes)
    got = np.bincount(outcomes.tenant, served_until(outcomes, window), num)
    wanted = np.bincount(outcomes.tenant, demanded(outcomes), num)
    parts = np.array([(weights or {}).get(name, 1.0) for name in outcomes.tenants])
    fair = max_min_shares(np.asarray(wanted, np.float64), float(got.sum()), parts)
    return Fairness(np.divide(got, fair, out=np.full(num, np.nan), where=fair > 0))


# Memory


def kv_use(result: RunResult) -> float:
    """Mean share of the pool that was allocated while the engine was at work."""
    return _rate(result.steps.kv_allocated_s, result.num_kv_slots * result.steps.busy_s)


def cached_share(outcomes: Outcomes) -> float:
    """Of all prompt tokens, those found in the prefix cache."""
    return _rate(float(outcomes.num_cached_tokens.sum()), float(outcomes.num_prompt_tokens.sum()))


def num_of(outcomes: Outcomes, finish: Finish) -> int:
    return int((outcomes.finish == finish).sum())
