"""The draw of random rows on the host.

A row draws from the tokens that min-p, top-k and top-p leave: in order of ids each takes a share of (0, 1) as wide as its
probability, and the row's number falls into one of them. How they are found depends on the row alone:

- `weighed`: each token's weight is known by itself, so sums of blocks are enough. With top-p alone, of a half and more, a token
  is drawn from the whole and counts if it belongs to the nucleus (`nucleus.py`); else with the row's next number, `NUM_CHECKED`
  times, which fails for one row in sixteen at most;
- `ranked`: else, and where those attempts failed, the best tokens above a floor, sorted (`truncate.py`). With min-p alone and
  many tokens above the floor, no order is needed, and these are weighed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.samplers.blocks import Blocks, Logits
from plugins.samplers.draw import Floats, Ints, Streams
from plugins.samplers.nucleus import in_nucleus
from plugins.samplers.truncate import NUM_CHECKED, Limits, draw_kept, kept_prefix
from plugins.samplers.weights import Scales

_GROWTH = 8  # times as many candidates where the first ones do not reach top_p
_NARROW = 256  # blocks: rows whose candidates are in no more of them share a matrix


@dataclass(frozen=True, slots=True)
class RandomRows:
    """S rows; those that are drawn from are good: their largest logit is finite."""

    logits: torch.Tensor  # [S, V] float32
    blocks: Blocks
    limits: Limits
    streams: Streams


class HostDraw:
    """Methods take rows `part` [n] (ascending) of S and give their token ids [n]."""

    def __init__(self, first_candidates: int):
        self._first_candidates = first_candidates
        self._scales = Scales()

    def weighed(self, rows: RandomRows, part: Ints) -> Ints:
        """Rows with a temperature, and `Limits.checked` ones."""
        limits, streams = rows.limits.take(part), rows.streams.take(part)
        weights = self._scales.weigh(rows.logits, part, rows.blocks, limits.temperature)
        goals = limits.goals(weights.totals)
        token_ids = weights.draw(np.arange(len(part)), streams.numbers())
        left = np.flatnonzero(goals < np.inf)
        for attempt in range(1, NUM_CHECKED + 1):
            if len(left):
                left = left[~in_nucleus(weights, left, token_ids[left], goals[left])]
            if not len(left):
                return token_ids
            if attempt < NUM_CHECKED:
                token_ids[left] = weights.draw(left, streams.take(left).numbers(attempt))
        token_ids[left] = self._best(rows, part[left], NUM_CHECKED, self._first_candidates)
        return token_ids

    def ranked(self, rows: RandomRows, part: Ints) -> Ints:
        """All other rows."""
        return self._best(rows, part, 0, self._first_candidates)

    def _best(self, rows: RandomRows, part: Ints, attempt: int, count: int) -> Ints:
        """`count`: candidates to try where top-p is alone."""
        limits = rows.limits.take(part)
        floors = _floors(rows.blocks, part, limits, min(count, rows.logits.shape[1]))
        wide = (rows.blocks.maxima[part] >= floors[:, None]).sum(1) > _NARROW
        weighed = np.flatnonzero(wide & limits.min_p_alone)
        token_ids = np.empty(len(part), np.int64)
        if len(weighed):
            token_ids[weighed] = self._above(rows, part[weighed])
        for which in (np.flatnonzero(~wide), *np.flatnonzero(wide & ~limits.min_p_alone)[:, None]):
            if len(which):
                token_ids[which] = self._kept(rows, part[which], floors[which], attempt, count)
        return token_ids

    def _above(self, rows: RandomRows, part: Ints) -> Ints:
        limits = rows.limits.take(part)
        weights = self._scales.weigh(rows.logits, part, rows.blocks, limits.temperature, limits.min_p)
        return weights.draw(np.arange(len(part)), rows.streams.take(part).numbers())

    def _kept(self, rows: RandomRows, part: Ints, floors: Logits, attempt: int, count: int) -> Ints:
        limits = rows.limits.take(part)
        ranked = rows.blocks.best_above(part, floors)
        complete = ~limits.top_p_alone | (floors == -np.inf)
        prefix = kept_prefix(ranked.values, limits, complete, self._totals(rows, part, complete))
        token_ids = draw_kept(prefix, ranked.ids, rows.streams.take(part).numbers(attempt))
        more = np.flatnonzero(~prefix.complete)
        if len(more):
            token_ids[more] = self._best(rows, part[more], attempt, count * _GROWTH)
        return token_ids

    def _totals(self, rows: RandomRows, part: Ints, complete: NDArray[np.bool_]) -> Floats:
        """Weight of the whole vocabulary [n] where the best token weighs 1, worked out for the rows that need it."""
        totals = np.ones(len(part))
        needed = np.flatnonzero(~complete)
        if len(needed):
            own = part[needed]
            weights = self._scales.weigh(rows.logits, own, rows.blocks, rows.limits.temperature[own])
            totals[needed] = weights.totals / weights.values.max((1, 2))
        return totals


def _floors(blocks: Blocks, part: Ints, limits: Limits, count: int) -> Logits:
    """Logits [n] below which nothing is kept; with top-p alone, those that `count` tokens reach."""
    floors = blocks.kth_best(part, np.where(limits.top_p_alone, count, limits.top_k))
    return np.maximum(floors, limits.least_logits(blocks.maxima[part].max(1)))
