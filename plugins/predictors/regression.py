"""A sum of weights, one for each feature that is present, learnt one observation at a time.

Bayesian linear regression with a diagonal covariance (a Kalman filter that takes weights as independent; idea: AROW, Crammer
et al. 2009). A weight that was seen often moves little, a new one moves much, and one that is explained by others stays near 0:
so a feature that only few requests have is shrunk towards what the others say.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NOISE = 0.5  # variance of an observation around its prediction
PRIOR_VARIANCES = (4.0, 0.3, 0.3, 0.3, 0.6, 0.3, 0.6, 0.08)  # of a weight never seen, by kind of feature
DRIFT = 0.0005  # by which a weight's variance grows when it is seen: traffic changes


class Regression:
    """Weights in a table with one place for each (kind, key modulo size): the newest key has it, and another starts anew.

    So memory is fixed, and a key never reads what was learnt of another one.
    """

    def __init__(self, size: int, first: float):
        """`first`: the prediction before anything is observed."""
        self._size = size
        num_places = size * len(PRIOR_VARIANCES)
        self._keys = array("Q", bytes(8 * num_places))  # 0: nobody's
        self._weights = array("d", bytes(8 * num_places))
        self._variances = array("d", (prior for prior in PRIOR_VARIANCES for _ in range(size)))
        self._first = first

    def predict(self, features: Sequence[tuple[int, int]]) -> float:
        size, keys, weights = self._size, self._keys, self._weights
        total = self._first
        for kind, key in features:
            place = kind * size + key % size
            if keys[place] == key:
                total += weights[place]
        return total

    def update(self, features: Sequence[tuple[int, int]], error: float) -> None:
        """`error`: what was observed, less what `predict` said of the same features."""
        places = [self._place(kind, key) for kind, key in features]
        variances = self._variances
        total = NOISE + sum(variances[place] for place in places)
        for (kind, _), place in zip(features, places, strict=True):
            gain = variances[place] / total
            self._weights[place] += gain * error
            variances[place] = min(variances[place] * (1 - gain) + DRIFT, PRIOR_VARIANCES[kind])

    def _place(self, kind: int, key: int) -> int:
        place = kind * self._size + key % self._size
        if self._keys[place] != key:
            self._keys[place], self._weights[place] = key, 0.0
            self._variances[place] = PRIOR_VARIANCES[kind]
        return place
