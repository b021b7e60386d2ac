"""How sure a mean of a few runs is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist, fmean, stdev

# 97.5 % quantiles of Student's t distribution by degrees of freedom, 1 to 30
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the bounds between which the true one lies in 95 of 100 such experiments."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """Without bounds where nothing is known of them."""
        return f"{self.mean:+.1%}" + (f" [{self.low:+.1%}, {self.high:+.1%}]" if isfinite(self.high) else "")


def t_interval(values: Sequence[float]) -> Interval:
    """Student's, for independent values that are about normal. Of a single value nothing is known."""
    if len(values) < 2:
        return Interval(fmean(values) if values else 0.0, float("-inf"), float("inf"))
    mean, freedom = fmean(values), len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NormalDist().inv_cdf(0.975)
    half = quantile * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def relative_change(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Of pairs that saw the same traffic (common random numbers), as a share of the baseline: -0.2 is a fifth less."""
    return t_interval([value / base - 1 for value, base in zip(values, baseline, strict=True) if base])
