"""Lengths of prompts and outputs with given quantiles: a smooth monotone quantile function through them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.simulation.records import Floats, Ints

NORMAL = NormalDist()
KNOTS = tuple(NORMAL.inv_cdf(q) for q in (0.5, 0.9, 0.99))  # normal scores of the three quantiles


class Lengths(BaseModel):
    """A distribution of token counts by its median, 90th and 99th percentile, within [1, cap].

    The logarithm of the length is a function of the normal score: a monotone cubic through the three points, and straight
    lines beyond them, so both tails are log-normal. A log-normal distribution is the special case of a straight line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    p50: float = Field(ge=1)
    p90: float = Field(ge=1)
    p99: float = Field(ge=1)
    cap: int = Field(default=32_768, ge=1, description="longest; longer ones are cut to it")

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if not self.p50 <= self.p90 <= self.p99 <= self.cap:
            raise ValueError(f"p50 <= p90 <= p99 <= cap must hold (got {self.p50}, {self.p90}, {self.p99}, {self.cap})")
        return self

    @classmethod
    def of(cls, length: int) -> Lengths:
        """All of this length."""
        return cls(p50=length, p90=length, p99=length, cap=max(length, 1))

    @cached_property
    def _curve(self) -> MonotoneCubic:
        return MonotoneCubic(KNOTS, [float(np.log(value)) for value in (self.p50, self.p90, self.p99)])

    def at(self, scores: Floats) -> Ints:
        """Lengths of these normal scores, same shape."""
        longest = np.log(self.cap)
        lengths = np.exp(np.minimum(self._curve(scores), longest))
        return np.maximum(np.rint(lengths).astype(np.int64), 1)

    def draw(self, rng: np.random.Generator, num: int) -> Ints:
        """[num] independent lengths."""
        return self.at(rng.standard_normal(num))

    def quantile(self, q: float) -> int:
        return int(self.at(np.array([NORMAL.inv_cdf(q)]))[0])


class MonotoneCubic:
    """A monotone piecewise cubic with continuous first derivative, continued by straight lines on both sides.

    Slopes at the knots by Fritsch and Butland: the weighted harmonic mean of the two secants (A Method for Constructing
    Local Monotone Piecewise Cubic Interpolants, 1984), at the ends those of the outer secants.
    """

    def __init__(self, x: Sequence[float], y: Sequence[float]):
        self._x, self._y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        self._steps = np.diff(self._x)
        self._slopes = self._at_knots(np.diff(self._y) / self._steps)

    def _at_knots(self, secants: Floats) -> Floats:
        left, right = secants[:-1], secants[1:]
        h0, h1 = self._steps[:-1], self._steps[1:]
        w0, w1 = 2 * h1 + h0, h1 + 2 * h0
        with np.errstate(divide="ignore"):
            inner = np.where(left * right > 0, (w0 + w1) / (w0 / left + w1 / right), 0.0)
        return np.concatenate((secants[:1], inner, secants[-1:]))

    def __call__(self, at: Floats) -> Floats:
        x, y, m = self._x, self._y, self._slopes
        inside = np.clip(at, x[0], x[-1])
        k = np.clip(np.searchsorted(x, inside, side="right") - 1, 0, len(x) - 2)
        h = self._steps[k]
        t = (inside - x[k]) / h
        cubic: Any = (
            y[k] * (1 + 2 * t) * (1 - t) ** 2
            + h * m[k] * t * (1 - t) ** 2
            + y[k + 1] * t**2 * (3 - 2 * t)
            - h * m[k + 1] * t**2 * (1 - t)
        )
        outside = np.where(at < x[0], m[0] * (at - x[0]), 0.0) + np.where(at > x[-1], m[-1] * (at - x[-1]), 0.0)
        return np.asarray(cubic + outside, np.float64)
