"""Pictures of runs and tables, as PNG or SVG by the file's name. Needs matplotlib: `pip install nonet[plots]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError
from core.simulation.metrics import slowdown
from core.simulation.records import Floats, Outcomes, RunResult

MAX_POINTS = 2_000  # of a curve
WIDE = 50  # from the least to the greatest value, for a logarithmic axis


def plot(result: RunResult, path: str) -> None:
    """One run: how TTFT, TPOT and slowdown are distributed, and what ran, waited and was held over time."""
    figure, axes = _figure(2, 2, "plot")
    outcomes = result.outcomes
    for axis, (title, values) in zip(axes.flat, _distributions(outcomes).items(), strict=False):
        _distribution(axis, title, {"": values})
    _timeline(axes.flat[3], result)
    _save(figure, path, "plot")


def _distributions(outcomes: Outcomes) -> dict[str, Floats]:
    served = outcomes.served
    return {
        "TTFT in s": outcomes.ttft_s[served],
        "TPOT in s": outcomes.tpot_s[served],
        "slowdown": slowdown(outcomes)[served],
    }


def plot_curves(curves: Mapping[str, Floats], title: str, path: str) -> None:
    """One curve per name: which share of the values is at most x."""
    figure, axes = _figure(1, 1, "plot")
    _distribution(axes.flat[0], title, curves)
    _save(figure, path, "plot")


def plot_bars(rows: Sequence[str], series: Mapping[str, Sequence[float]], title: str, path: str) -> None:
    """Grouped bars: one group per row, one colour per series."""
    figure, axes = _figure(1, 1, "plot", width=2 + 0.9 * len(rows))
    axis, width = axes.flat[0], 0.8 / max(len(series), 1)
    at = np.arange(len(rows))
    for index, (name, values) in enumerate(series.items()):
        axis.bar(at + index * width, np.nan_to_num(np.asarray(values, np.float64)), width, label=name)
    axis.set_xticks(at + 0.4 - width / 2, rows, rotation=30, ha="right")
    axis.set_title(title)
    axis.legend()
    _save(figure, path, "plot")


def _distribution(axis: Any, title: str, curves: Mapping[str, Floats]) -> None:
    """Values that differ by orders of magnitude stand on a logarithmic axis."""
    wide = False
    for name, values in curves.items():
        ordered = np.sort(values[np.isfinite(values)])
        if len(ordered):
            ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_POINTS)).astype(int))
            axis.plot(ordered[ranks], (ranks + 1) / len(ordered), label=name)
            wide = wide or 0 < ordered[0] * WIDE < ordered[-1]
    axis.set(title=title, ylabel="share of requests", ylim=(0, 1), xscale="log" if wide else "linear")
    axis.grid(alpha=0.3)
    if any(curves):
        axis.legend()


def _timeline(axis: Any, result: RunResult) -> None:
    timeline = result.timeline
    axis.plot(timeline.time_s, timeline.running, label="running")
    axis.plot(timeline.time_s, timeline.waiting, label="waiting")
    axis.set(title="requests over time", xlabel="s")
    axis.legend(loc="upper left")
    share = axis.twinx()
    share.plot(timeline.time_s, timeline.kv_used, color="grey", alpha=0.5)
    share.set(ylim=(0, 1), ylabel="share of the KV pool")


def _figure(rows: int, columns: int, key: str, width: float = 0.0) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{key}: plots need matplotlib: pip install nonet[plots], or leave {key} out", key) from None
    figure = Figure(figsize=(max(width, 5.0 * columns), 4.0 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: str, key: str) -> None:
    """Raises ConfigError for a kind of file that cannot be written, and for a place that cannot."""
    if Path(path).suffix not in (".png", ".svg"):
        raise ConfigError(f"{key}={path}: write a .png or a .svg", key)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror or error}", key) from None
