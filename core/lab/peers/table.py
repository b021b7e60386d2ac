"""Figures of engines that took turns, and ratios of one to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

OURS = "nonet"
LESS_IS_BETTER = "_s"  # times; rates end with per_s


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one piece. `values`: engine -> a number per round; rates per second, or seconds."""

    piece: str
    figure: str
    values: Mapping[str, Sequence[float]]
    target: str = ""

    @property
    def is_time(self) -> bool:
        return self.figure.endswith(LESS_IS_BETTER) and not self.figure.endswith("per_s")

    def ratios(self, peer: str) -> list[float]:
        """Of each round, above 1 where we are ahead."""
        pairs = zip(self.values[OURS], self.values[peer], strict=True)
        return [theirs / ours if self.is_time else ours / theirs for ours, theirs in pairs]

    def shown(self, value: float) -> str:
        return f"{1000 * value:.1f} ms" if self.is_time else f"{value:.1f}/s"


@dataclass(slots=True)
class Rounds:
    """Figures of one piece, as they come."""

    piece: str
    targets: Mapping[str, str] = field(default_factory=dict)
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # figure -> engine -> rounds

    def add(self, engine: str, figures: Mapping[str, float]) -> None:
        for figure, value in figures.items():
            self.found.setdefault(figure, {}).setdefault(engine, []).append(value)

    def rows(self) -> list[Row]:
        """Of figures that we have, with the engines that were there in every round of ours."""
        rows = []
        for figure, values in self.found.items():
            if own := values.get(OURS):
                whole = {engine: each for engine, each in values.items() if len(each) == len(own)}
                rows.append(Row(self.piece, figure, whole, self.targets.get(figure, "")))
        return rows


def as_text(rows: Sequence[Row]) -> str:
    """A line per engine: median with its spread, and our ratio to it, likewise."""
    lines = [f"{'piece':<14}{'figure':<22}{'engine':<20}{'median':>12}  {'least to most':<26}nonet ahead by"]
    for row in rows:
        for engine, values in row.values.items():
            spread = f"{row.shown(min(values))} to {row.shown(max(values))}"
            ratio = ""
            if engine != OURS:
                ratios = row.ratios(engine)
                ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            elif row.target:
                ratio = f"target: {row.target}"
            head = f"{row.piece:<14}{row.figure:<22}{engine:<20}{row.shown(median(values)):>12}"
            lines.append(f"{head}  {spread:<26}{ratio}".rstrip())
    return "\n".join(lines)
