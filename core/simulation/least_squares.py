"""Non-negative least squares in which errors count in relation to what is measured, and exceptions count less."""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np

from core.simulation.records import Floats

ROUNDS: Final = 10
NEAR: Final = 1.5  # times the typical error: from there on an error counts in proportion, not by its square
LEAST_ERROR: Final = 0.002  # what is typical at the least


def non_negative(rows: Floats, targets: Floats) -> Floats:
    """The x >= 0 with the least |rows @ x - targets|². Tries every set of terms that may be positive, so for few terms only.

    Of the sets whose own solution is not negative the best one holds the optimum (Lawson and Hanson, Solving Least Squares
    Problems, chapter 23). The slow twin of what `core.stages.step_cost` does in every engine step.
    """
    num_terms = rows.shape[1]
    best, least = np.zeros(num_terms), float(targets @ targets)
    for size in range(1, num_terms + 1):
        for used in combinations(range(num_terms), size):
            found = np.linalg.lstsq(rows[:, used], targets, rcond=None)[0]
            error = float(np.square(rows[:, used] @ found - targets).sum())
            if error < least and (found >= 0).all():
                best, least = np.zeros(num_terms), error
                best[list(used)] = found
    return best


def fitted(features: Floats, seconds: Floats) -> Floats:
    """One coefficient per column of `features` [steps, terms]. A tenth too much is as bad for a short step as for a long one.

    Huber's weights in a few rounds: what the machine did besides, in some steps, hardly matters.
    """
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    rows = features / scale / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        found = non_negative(rows * weights[:, None], weights)
        errors = np.abs(rows @ found - 1)
        bound = NEAR * max(float(np.median(errors)), LEAST_ERROR)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return np.asarray(found / scale)
