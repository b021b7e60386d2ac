"""The report of one run: JSON-ready figures, and the same as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from core.simulation import metrics
from core.simulation.metrics import Slo, summary
from core.simulation.records import Finish, Outcomes, RunResult

MAX_TENANTS_SHOWN = 32


class ReportSettings(BaseModel):
    """What is reported, and where to."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    slo_ttft: float = Field(default=1.0, gt=0, description="goodput counts requests with at most this TTFT, in seconds")
    slo_tpot: float = Field(default=0.1, gt=0, description="and at most this TPOT, in seconds")
    plot: str | None = Field(
        default=None, description="a PNG or SVG file to write; needs matplotlib (pip install nonet[plots])"
    )

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft, self.slo_tpot)


def report(result: RunResult, settings: ReportSettings) -> dict[str, Any]:
    """Times in seconds, rates per second, shares from 0 to 1."""
    outcomes, steps = result.outcomes, result.steps
    fairness = metrics.fairness(outcomes)
    met = settings.slo.met(outcomes)
    return {
        "requests": {"all": len(outcomes), **{each.name.lower(): metrics.num_of(outcomes, each) for each in Finish}},
        "reasons": result.reasons,
        "left_out": dict(result.left_out),
        **latencies(outcomes, outcomes.served),
        "rates": _rates(result),
        "goodput": {
            "slo": {"ttft_s": settings.slo_ttft, "tpot_s": settings.slo_tpot},
            "requests_per_s": metrics.goodput(outcomes, settings.slo),
            "share": float(met.mean()) if len(met) else 0.0,
        },
        "fairness": {"jain": _known(fairness.jain), "least_share": _known(fairness.least)},
        "tenants": _tenants(outcomes, fairness, met),
        "preemptions": {
            "all": steps.num_preemptions,
            "requests": int((outcomes.num_preemptions > 0).sum()),
            "blocks_swapped_out": steps.num_blocks_swapped_out,
            "blocks_swapped_in": steps.num_blocks_swapped_in,
        },
        "kv": {
            "slots": result.num_kv_slots,
            "use": metrics.kv_use(result),
            "waste": result.kv_waste,
            "cached_share": metrics.cached_share(outcomes),
        },
        "steps": {"count": steps.num_steps, "plans": steps.num_plans, "mean_running": result.mean_running},
        "simulated_s": result.simulated_s,
        "wall_s": result.wall_s,
    }


def latencies(outcomes: Outcomes, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, dict[str, float]]:
    """Summaries over some of the requests."""
    return {
        "ttft_s": summary(outcomes.ttft_s[rows]),
        "tpot_s": summary(outcomes.tpot_s[rows]),
        "e2e_s": summary(outcomes.e2e_s[rows]),
        "slowdown": summary(metrics.slowdown(outcomes)[rows]),
    }


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _rates(result: RunResult) -> dict[str, float]:
    """Requests by the time in which they arrive, as goodput is; tokens and work by the whole time."""
    outcomes, window = result.outcomes, metrics.arrival_window_s(result.outcomes)
    whole = result.simulated_s or 1.0
    served = outcomes.served
    return {
        "offered_requests_per_s": len(outcomes) / window if window else 0.0,
        "served_requests_per_s": float(served.sum()) / window if window else 0.0,
        "arrival_window_s": window,
        "prompt_tokens_per_s": float(outcomes.num_prompt_tokens[served].sum()) / whole,
        "output_tokens_per_s": float(outcomes.num_output_tokens[served].sum()) / whole,
        "busy_share": result.steps.busy_s / whole,
    }


def _tenants(
    outcomes: Outcomes, fairness: metrics.Fairness, met: np.ndarray[Any, np.dtype[np.bool_]]
) -> dict[str, dict[str, Any]]:
    """By name; nothing where there is one tenant, and the first ones where there are very many."""
    names = outcomes.tenants[:MAX_TENANTS_SHOWN] if len(outcomes.tenants) > 1 else ()
    found = {}
    for index, name in enumerate(names):
        mine = outcomes.tenant == index
        found[name] = {
            "requests": int(mine.sum()),
            "share": _known(float(fairness.shares[index])),
            "slo_share": float(met[mine].mean()) if mine.any() else 0.0,
            **latencies(outcomes, mine & outcomes.served),
        }
    return found


# As text

ROWS = (
    ("TTFT", "ttft_s", 1000.0),
    ("TPOT", "tpot_s", 1000.0),
    ("latency", "e2e_s", 1000.0),
    ("slowdown", "slowdown", 1.0),
)
TOO_SHORT = "(too short a trace)"
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def text(found: Mapping[str, Any]) -> str:
    """About twenty lines for a reader."""
    rates, kv = found["rates"], found["kv"]
    lines = [
        *_request_lines(found),
        f"tokens       {rates['prompt_tokens_per_s']:,.0f} prompt and {rates['output_tokens_per_s']:,.0f} output per second",
        *_latency_lines(found),
        _goodput_line(found),
        _fairness_line(found),
        *_tenant_lines(found["tenants"]),
        f"preemptions  {found['preemptions']['all']:,} of {found['preemptions']['requests']:,} requests; "
        f"{found['preemptions']['blocks_swapped_out']:,} blocks swapped out, {found['preemptions']['blocks_swapped_in']:,} in",
        f"KV           {kv['use']:.1%} of {kv['slots']:,} slots allocated, {kv['waste']:.2%} of those unused; "
        f"{kv['cached_share']:.1%} of the prompt tokens cached",
        f"steps        {found['steps']['count']:,}, of {found['steps']['mean_running']:.1f} requests on average, "
        f"busy {rates['busy_share']:.0%} of the time",
        f"time         {found['simulated_s']:,.1f} s simulated in {found['wall_s']:.1f} s",
    ]
    return "\n".join(lines)


def _request_lines(found: Mapping[str, Any]) -> list[str]:
    """What became of them, and why of some of them nothing did."""
    requests, rates = found["requests"], found["rates"]
    ended = ", ".join(f"{number:,} {word}" for word, number in requests.items() if word != "all" and number)
    offered, served = (_rate(found, rates[f"{word}_requests_per_s"]) for word in ("offered", "served"))
    lines = [f"requests     {requests['all']:,}: {ended}; offered {offered}, of these served {served}"]
    for finish, reasons in found["reasons"].items():
        lines += [f"  {finish:<11}{number:>9,}: {reason}" for reason, number in reasons.items()]
    lines += [f"  {'left out':<11}{number:>9,} rows {why}" for why, number in found["left_out"].items()]
    return lines


def _rate(found: Mapping[str, Any], per_second: float) -> str:
    """Of requests, over the time in which they arrive."""
    return f"{per_second:.3g}/s" if found["rates"]["arrival_window_s"] else TOO_SHORT


def _goodput_line(found: Mapping[str, Any]) -> str:
    goodput, slo = found["goodput"], found["goodput"]["slo"]
    return (
        f"goodput      {_rate(found, goodput['requests_per_s'])}, {goodput['share']:.1%} of the requests, with TTFT at most "
        f"{slo['ttft_s']:g} s and TPOT at most {slo['tpot_s']:g} s"
    )


def _fairness_line(found: Mapping[str, Any]) -> str:
    index, least = found["fairness"]["jain"], found["fairness"]["least_share"]
    if index is None:
        return f"fairness     Jain index {TOO_SHORT if found['requests']['served'] else '(nobody was served)'}"
    return f"fairness     Jain index {index:.3f}, least share {least:.2f}"


def _latency_lines(found: Mapping[str, Any]) -> list[str]:
    lines = ["             " + "".join(f"{column:>12}" for column in COLUMNS)]
    for title, key, factor in ROWS:
        if found[key]:
            cells = "".join(f"{factor * found[key][column]:>12,.1f}" for column in COLUMNS)
            lines.append(f"{title:<13}{cells}{' ms' if factor != 1 else ''}")
    return lines


def _tenant_lines(tenants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, one in tenants.items():
        share = "-" if one["share"] is None else f"{one['share']:.2f}"
        p99 = f"{1000 * one['ttft_s']['p99']:,.1f} ms" if one["ttft_s"] else "-"
        lines.append(f"  {name:<11}{one['requests']:>9,} requests, share {share:>5}, TTFT p99 {p99}")
    return lines
