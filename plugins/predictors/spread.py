"""How far outputs fall from what was predicted, as a distribution: what is left of one that has come to some length already.

Long outputs are of two kinds, those that were predicted long and those that were not; a request that goes on past its prediction
is more and more likely of the second. So what is left is E[L - n | L > n], and not E[L] - n. Outputs that max_tokens cut off
would have gone on: they count as not ended at their length (Kaplan and Meier 1958).
"""

from __future__ import annotations

import math
from itertools import accumulate

WIDTH = 0.25  # of a bin, in units of log tokens
HALF = 20  # bins on each side of 0
EDGES = tuple(WIDTH * (index - HALF) for index in range(2 * HALF + 1))
SIZES = tuple(math.exp(low + WIDTH / 2) for low in EDGES[:-1])  # of an output in a bin, over its prediction
PRIOR_DEVIATION = 0.8
PRIOR_COUNT = 8.0  # what the prior weighs, in observations
MOST = 2048.0  # observations after which all counts are halved: traffic changes
REFRESH = 16  # observations after which what follows from the counts is computed again


class Spread:
    """Of r = log(1 + L) - prediction, in bins."""

    def __init__(self) -> None:
        shape = [math.exp(-((low + WIDTH / 2) ** 2) / (2 * PRIOR_DEVIATION**2)) for low in EDGES[:-1]]
        self._ended = [PRIOR_COUNT * one / sum(shape) for one in shape]
        self._cut = [0.0] * len(shape)  # of those that max_tokens ended
        self._total = PRIOR_COUNT
        self._num_new = 0
        self._refresh()

    def add(self, residual: float, is_cut: bool) -> None:
        counts = self._cut if is_cut else self._ended
        counts[_bin(residual)] += 1.0
        self._total += 1.0
        self._num_new += 1
        if self._total > MOST:
            self._ended = [count / 2 for count in self._ended]
            self._cut = [count / 2 for count in self._cut]
            self._total /= 2
        if self._num_new >= REFRESH:
            self._num_new = 0
            self._refresh()

    def left(self, prediction: float, num_tokens: int) -> float:
        """Tokens still to come of an output that has `num_tokens` and goes on; more than 0."""
        have = 1.0 + num_tokens
        reached = math.log(have) - prediction
        if reached >= EDGES[-1]:
            return have * (math.exp(WIDTH) - 1)  # past all that was ever seen: the longer, the longer still
        index = _bin(reached)
        if reached <= EDGES[0]:
            share, size = 1.0, SIZES[0]
        else:
            share = (EDGES[index + 1] - reached) / WIDTH
            size = math.exp((EDGES[index + 1] + reached) / 2)
        here = share * self._mass[index]
        mass = here + self._mass_from[index + 1]
        if mass < 1e-9:
            return have * (math.exp(WIDTH) - 1)
        mean = (here * size + self._size_from[index + 1]) / mass
        return max(math.exp(prediction) * mean - have, 0.0)

    def _refresh(self) -> None:
        """The probability of each bin, and sums from each bin on."""
        at_risk = _sums_from([ended + cut for ended, cut in zip(self._ended, self._cut, strict=True)])
        going_on, mass = 1.0, []
        for ended, risk in zip(self._ended, at_risk, strict=False):
            mass.append(going_on * ended / risk if risk else 0.0)
            going_on -= mass[-1]
        mass[-1] += max(going_on, 0.0)
        self._mass = mass
        self._mass_from = _sums_from(mass)
        self._size_from = _sums_from([one * size for one, size in zip(mass, SIZES, strict=True)])


def _bin(residual: float) -> int:
    return min(max(math.floor(residual / WIDTH) + HALF, 0), 2 * HALF - 1)


def _sums_from(values: list[float]) -> list[float]:
    """Of each place and all after it; one more for the end."""
    return [*reversed(list(accumulate(reversed(values)))), 0.0]
