"""min-p, top-k and top-p in one pass over the best candidates of each row.

With tokens ordered best first (ties by id) each of the three keeps a prefix, so together they keep the shortest. min-p
compares with the best token's probability (Nguyen et al. 2024), top-k counts (Fan et al. 2018), and top-p keeps the
shortest prefix that reaches `top_p` of what the other two left (Holtzman et al. 2019). One token always stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.samplers.draw import Floats, Ints

TOP_P_SLACK = 1e-6  # top_p counts as reached this much early, so that rounding cannot add a token at an exact tie


@dataclass(frozen=True, slots=True)
class Limits:
    """What shapes the distribution of n random rows; arrays [n]."""

    temperature: Floats
    top_k: Ints  # vocabulary size when off
    top_p: Floats  # 1.0 when off
    min_p: Floats  # 0.0 when off

    def take(self, rows: Ints) -> Limits:
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def top_p_alone(self, vocab_size: int) -> NDArray[np.bool_]:
        """Rows whose nucleus is a share of the whole vocabulary."""
        alone: NDArray[np.bool_] = (self.top_p < 1.0) & (self.min_p <= 0.0) & (self.top_k == vocab_size)
        return alone


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What may be drawn: entry i of row r for i < kept[r], with weights as sums so far."""

    cumulative: Floats  # [n, K], non-decreasing
    kept: Ints  # [n], at least 1
    complete: NDArray[np.bool_]  # [n]; False where the answer lies past the K candidates


def kept_prefix(values: NDArray[np.float32], limits: Limits, totals: Floats, vocab_size: int) -> KeptPrefix:
    """`values` [n, K]: logits of the best K candidates, best first, finite at index 0. `totals` [n]: weight of the whole
    vocabulary where the best token weighs 1, read for rows with top_p alone.

    Sums run in float64 from left to right, so a row's numbers do not depend on K or on its neighbours.
    """
    width = values.shape[1]
    weights = _weights(values, limits.temperature)
    eligible = (np.arange(width) < limits.top_k[:, None]) & (weights >= limits.min_p[:, None]) & (weights > 0.0)
    eligible[:, 0] = True
    cumulative = np.where(eligible, weights, 0.0).cumsum(1)
    bounded = ~eligible[:, -1] | (limits.top_k <= width) | (width == vocab_size)
    totals = np.where(bounded, cumulative[:, -1], totals)
    short = cumulative < ((limits.top_p - TOP_P_SLACK) * totals)[:, None]  # top_p not reached with this token yet
    nucleus = np.where(limits.top_p < 1.0, short.sum(1) + 1, width + 1)
    kept = np.maximum(np.minimum(eligible.sum(1), nucleus), 1)
    return KeptPrefix(cumulative, kept, bounded | ((nucleus <= width) & limits.top_p_alone(vocab_size)))


def _weights(values: NDArray[np.float32], temperature: Floats) -> Floats:
    """exp((logit - best) / temperature), float64; 0 for masked tokens."""
    wide = values.astype(np.float64)
    weights: Floats = np.exp((wide - wide[:, :1]) / temperature[:, None])
    return weights
