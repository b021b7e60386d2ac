"""Figures of calls. Times in seconds, rates per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from core.errors import NonetError
from core.lab.bench.calls import Call
from core.simulation.metrics import summary

Report = dict[str, Any]
"""JSON-ready. `headline` has the few figures, by name, that are printed and that `repeat` gives the spread of."""


def whole(calls: Iterable[Call]) -> list[Call]:
    """Those that were answered. Raises NonetError where none was, with what the first one got."""
    every = list(calls)
    answered = [call for call in every if not call.error]
    if every and not answered:
        raise NonetError(f"none of {len(every)} calls was answered; the first: {every[0].error}")
    return answered


def throughput(calls: Sequence[Call], wall_s: float) -> Report:
    """Rates and latencies; calls that failed are counted, and are in nothing else."""
    answered = whole(calls)
    failed = [call for call in calls if call.error]
    num_prompt = sum(call.num_prompt_tokens for call in answered)
    num_output = sum(call.num_tokens for call in answered)
    return {
        "num_requests": len(answered),
        "num_failed": len(failed),
        **({"first_failure": failed[0].error} if failed else {}),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "wall_s": wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "total_tokens_per_s": (num_prompt + num_output) / wall_s,
        "ttft_s": measured(call.ttft for call in answered),
        "tpot_s": measured(call.tpot for call in answered),
        "itl_s": measured(end - start for call in answered for start, end in call.gaps),
        "e2e_s": measured(call.e2e for call in answered),
    }


def measured(values: Iterable[float | None]) -> dict[str, float]:
    """Summary of what was measured: a request of one token has no TPOT."""
    return summary(np.array([value for value in values if value is not None], np.float64))


def quantiles(report: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Headline figures: `ttft_p50_s` is `report["ttft_s"]["p50"]`; none where nothing was measured."""
    found = {}
    for name in names:
        what, which, _ = name.rsplit("_", 2)
        if report[f"{what}_s"]:
            found[name] = report[f"{what}_s"][which]
    return found


def middle(values: Iterable[float | None]) -> float | None:
    """Median of what was measured."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def known(**values: float | None) -> dict[str, float]:
    """Those that there are."""
    return {name: value for name, value in values.items() if value is not None}
