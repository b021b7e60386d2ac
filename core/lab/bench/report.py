"""What a run says: several rounds as one report, and the lines for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from core.lab.bench.figures import Report

LABELS: Mapping[str, str] = {
    "output_tokens_per_s": "output",
    "total_tokens_per_s": "total",
    "decode_tokens_per_s": "decode",
    "prefill_tokens_per_s": "prefill",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "TPOT p99",
    "prefix_hit_share": "prefix hits",
    "ttft_without_hit_s": "TTFT without",
    "ttft_with_hit_s": "TTFT with hit",
    "worst_gap_s": "worst gap",
    "itl_before_s": "ITL before",
    "itl_beside_s": "ITL beside",
    "long_ttft_s": "prompt's TTFT",
    "schema_ratio": "schema/plain",
    "tpot_plain_s": "TPOT plain",
    "tpot_schema_s": "TPOT schema",
    "framework_share": "framework share",
}
WIDTH = max(map(len, LABELS.values())) + 2
ABOUT: Mapping[str, str] = {"prefix_hit_share": "of prompt tokens", "framework_share": "of a step"}


def over_rounds(found: Sequence[Report]) -> Report:
    """The report of a single round as it is; of several the headline's medians, their spread, and all reports."""
    if len(found) == 1:
        return found[0]
    spread = spread_of([report["headline"] for report in found])
    return {"headline": {name: one["median"] for name, one in spread.items()}, "spread": spread, "rounds": list(found)}


def spread_of(headlines: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """median, min and max of each figure over the rounds that have it."""
    names = dict.fromkeys(name for headline in headlines for name in headline)
    values = {name: [headline[name] for headline in headlines if name in headline] for name in names}
    return {name: {"median": median(v), "min": min(v), "max": max(v)} for name, v in values.items()}


def summary(report: Mapping[str, Any]) -> str:
    """A line for each figure of the headline, then what is known of steps, failures and limits."""
    spread = report.get("spread", {})
    lines = [line(name, value, spread.get(name)) for name, value in report["headline"].items()]
    last = report["rounds"][-1] if "rounds" in report else report
    if "tpot_s" in last and "tpot_p50_s" not in report["headline"] and not last["tpot_s"]:
        lines.append(f"{'TPOT p50':<{WIDTH}}not measured: one token per request")
    if last.get("num_failed"):
        lines.append(f"{'failed':<{WIDTH}}{last['num_failed']} calls; the first: {last['first_failure']}")
    if "steps" in last:
        steps = last["steps"]
        lines.append(f"{'steps':<{WIDTH}}{steps['count']}, of {steps['mean_requests']:.1f} requests on average")
    if "roofline" in last:
        lines.append(f"{'limits':<{WIDTH}}{last['roofline']['text']}")
    return "\n".join(lines)


def line(name: str, value: float, spread: Mapping[str, float] | None = None) -> str:
    about = f" {ABOUT[name]}" if name in ABOUT else ""
    over = f"  ({shown(name, spread['min'])} to {shown(name, spread['max'])})" if spread else ""
    return f"{LABELS.get(name, name):<{WIDTH}}{shown(name, value)}{about}{over}"


def shown(name: str, value: float) -> str:
    """In the unit that its name ends with."""
    if name.endswith("_per_s"):
        return f"{value:.1f} tokens/s"
    if name.endswith("_share"):
        return f"{100 * value:.1f} %"
    return f"{1000 * value:.1f} ms" if name.endswith("_s") else f"{value:.3f}"
