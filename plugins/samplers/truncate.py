"""min-p, top-k and top-p in one pass over the best candidates of each row.

With tokens ordered best first (ties by id) each of the three keeps a prefix, so together they keep the shortest. min-p
compares with the best token's probability (Nguyen et al. 2024), top-k counts (Fan et al. 2018), and top-p keeps the
shortest prefix that reaches `top_p` of what the other two left (Holtzman et al. 2019). One token always stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.samplers.draw import Floats, Ints, pick

TOP_P_SLACK = 1e-6  # top_p counts as reached this much early, so that rounding cannot add a token at an exact tie
CHECKED_TOP_P = (
    0.5  # with top-p alone, from here on a token is drawn from the whole, and counts if it lies in the nucleus;
)
NUM_CHECKED = 4  # else another one, so many in all; where none counts, it is drawn from the nucleus
MIN_P_SLACK = 1e-6  # a weight counts as reaching min_p that much below it, as a share


@dataclass(frozen=True, slots=True)
class Limits:
    """What shapes the distribution of n random rows; arrays [n]."""

    temperature: Floats
    top_k: Ints  # vocabulary size when off
    top_p: Floats  # 1.0 when off
    min_p: Floats  # 0.0 when off

    vocab_size: int

    def take(self, rows: Ints) -> Limits:
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.vocab_size)

    @property
    def top_p_alone(self) -> NDArray[np.bool_]:
        """Rows whose nucleus is a share of the whole vocabulary, and those without limits."""
        alone: NDArray[np.bool_] = (self.min_p == 0.0) & (self.top_k == self.vocab_size)
        return alone

    @property
    def min_p_alone(self) -> NDArray[np.bool_]:
        alone: NDArray[np.bool_] = (self.min_p > 0.0) & (self.top_k == self.vocab_size) & (self.top_p == 1.0)
        return alone

    def goals(self, totals: Floats) -> Floats:
        """The weight at which the nucleus ends, of `totals` [n]; infinite where top-p is off."""
        return np.where(self.top_p < 1.0, (self.top_p - TOP_P_SLACK) * totals, np.inf)

    def least_logits(self, peaks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n] below which min-p keeps nothing, or a little lower; `peaks` [n] are the best ones."""
        with np.errstate(divide="ignore"):
            least = peaks + self.temperature * (np.log(self.min_p) - 2.0 * MIN_P_SLACK)
        return np.nextafter(least.astype(np.float32), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What may be drawn: entry i of row r for i < kept[r]."""

    weights: Floats  # [n, K]; 0 past what is kept
    kept: Ints  # [n], at least 1
    complete: NDArray[np.bool_]  # [n]; False where the answer lies past the K candidates


def kept_prefix(values: NDArray[np.float32], limits: Limits, complete: NDArray[np.bool_], totals: Floats) -> KeptPrefix:
    """`values` [n, K]: logits of the best candidates, best first, finite at index 0. `complete` [n]: rows whose candidates are
    all that top-k and min-p leave; of the others, which have top-p alone, `totals` [n] is the weight of the whole vocabulary
    where the best token weighs 1.

    Sums run in float64 from left to right, so a row's numbers do not depend on K or on its neighbours.
    """
    width = values.shape[1]
    weights = _weights(values, limits.temperature)
    least = limits.min_p * (1.0 - MIN_P_SLACK)
    eligible = (np.arange(width) < limits.top_k[:, None]) & (weights >= least[:, None]) & (weights > 0.0)
    eligible[:, 0] = True
    cumulative = np.where(eligible, weights, 0.0).cumsum(1)
    goals = limits.goals(np.where(complete, cumulative[:, -1], totals))
    nucleus = (cumulative < goals[:, None]).sum(1) + 1  # top_p is reached with this token
    kept = np.maximum(np.minimum(eligible.sum(1), nucleus), 1)
    inside = np.arange(width) < kept[:, None]
    return KeptPrefix(np.where(inside, weights, 0.0), kept, complete | (nucleus <= width))


def draw_kept(prefix: KeptPrefix, ids: Ints, numbers: Floats) -> Ints:
    """Token ids [n], of `ids` [n, K], by inverse distribution function in order of ids, with `numbers` [n] in (0, 1)."""
    width = int(prefix.kept.max())
    inside = np.arange(width) < prefix.kept[:, None]
    order = np.where(inside, ids[:, :width], np.iinfo(np.int64).max).argsort(1)
    index = pick(np.take_along_axis(prefix.weights, order, 1).cumsum(1), numbers)
    rows = np.arange(len(index))
    token_ids: Ints = ids[rows, order[rows, index]]
    return token_ids


def _weights(values: NDArray[np.float32], temperature: Floats) -> Floats:
    """exp((logit - best) / temperature), float64; 0 for masked tokens."""
    wide = values.astype(np.float64)
    weights: Floats = np.exp((wide - wide[:, :1]) / temperature[:, None])
    return weights
