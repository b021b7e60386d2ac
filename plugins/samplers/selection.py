"""Logits that are masked and penalised -> one token id per row, by the part of the vocabulary a row draws from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch import SampledRow
from plugins.samplers.candidates import first_maximum, top_candidates
from plugins.samplers.columns import Columns
from plugins.samplers.draw import Floats, Ints, pick, row_uniforms
from plugins.samplers.truncate import Limits, kept_prefix
from plugins.samplers.verify import NO_TOKEN, take_rows
from plugins.samplers.whole import pick_whole, total_weights

_GROWTH = 8  # times as many candidates where the first ones do not reach top_p or min_p


@dataclass(frozen=True, slots=True)
class RandomRows:
    """n rows to draw from, all good: their largest logit is finite."""

    logits: torch.Tensor  # [n, V]
    maxima: torch.Tensor  # [n, number of blocks]
    limits: Limits
    numbers: Floats  # [n] in (0, 1)

    def take(self, which: Ints) -> RandomRows:
        logits, maxima = take_rows(self.logits, which), take_rows(self.maxima, which)
        return RandomRows(logits, maxima, self.limits.take(which), self.numbers[which])


def select_tokens(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    rows: Sequence[SampledRow],
    columns: Columns,
    bad: Collection[int],
    chunk_floats: int,
) -> list[int]:
    """Ids [S]; NO_TOKEN for the rows in `bad`."""
    token_ids = np.full(len(rows), NO_TOKEN, dtype=np.int64)
    if len(columns.greedy):
        best = first_maximum(take_rows(logits, columns.greedy), take_rows(maxima, columns.greedy))
        token_ids[columns.greedy] = best.cpu().numpy()
    size = max(1, chunk_floats // logits.shape[1])
    for count, which in ((0, columns.whole), *columns.truncated.items()):
        good = which[~np.isin(which, list(bad))] if bad else which
        for start in range(0, len(good), size):
            part = good[start : start + size]
            numbers = row_uniforms([rows[row] for row in part])
            limits = columns.limits.take(part)
            random = RandomRows(take_rows(logits, part), take_rows(maxima, part), limits, numbers)
            token_ids[part] = _from_candidates(random, count) if count else _from_all(random)
    token_ids[list(bad)] = NO_TOKEN
    ids: list[int] = token_ids.tolist()
    return ids


def _from_all(rows: RandomRows) -> Ints:
    return pick_whole(rows.logits, rows.maxima.amax(-1), rows.limits.temperature, rows.numbers)


def _from_candidates(rows: RandomRows, count: int) -> Ints:
    """Draws from the best `count` candidates; rows whose answer may lie past those are tried again with more."""
    vocab_size = rows.logits.shape[1]
    best = top_candidates(rows.logits, rows.maxima, count)
    kept = kept_prefix(best.values.cpu().numpy(), rows.limits, _totals(rows, count), vocab_size)
    index = pick(kept.cumulative, kept.kept, rows.numbers)
    drawn: Ints = np.take_along_axis(best.ids.cpu().numpy(), index[:, None], 1)[:, 0]
    more = np.flatnonzero(~kept.complete)
    if len(more):
        drawn[more] = _from_candidates(rows.take(more), min(count * _GROWTH, vocab_size))
    return drawn


def _totals(rows: RandomRows, count: int) -> Floats:
    """Weight of the whole vocabulary [n], worked out for the rows that need it."""
    vocab_size = rows.logits.shape[1]
    totals = np.ones(len(rows.numbers))
    alone = np.flatnonzero(rows.limits.top_p_alone(vocab_size))
    if len(alone) and count < vocab_size:
        part = rows.take(alone)
        totals[alone] = total_weights(part.logits, part.maxima.amax(-1), part.limits.temperature)
    return totals
