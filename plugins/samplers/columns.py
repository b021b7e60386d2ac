"""Sampling parameters of S rows as columns, made once for as long as the set of rows stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.batch import SampledRow
from core.request import SamplingParams
from plugins.samplers.masks import Masks, build_masks
from plugins.samplers.penalties import has_penalties
from plugins.samplers.truncate import CHECKED_TOP_P, Limits

LEAST_MIN_P = 1e-30  # float32 holds its inverse


@dataclass(frozen=True, slots=True)
class Columns:
    params: tuple[SamplingParams, ...]  # kept alive, so that identity is a safe comparison
    limits: Limits  # [S]
    greedy: NDArray[np.int64]  # row indices, likewise below; these three parts are disjoint and cover all rows
    weighed: NDArray[np.int64]  # random, likewise below; see `host_draw.py`
    ranked: NDArray[np.int64]
    masks: Masks
    penalised: tuple[int, ...]
    edited: tuple[int, ...]  # rows whose logits the sampler itself changes before the token is chosen
    with_logprobs: tuple[int, ...]

    @property
    def is_argmax(self) -> bool:
        """Whether each row's token is the largest logit, and nothing else is asked."""
        return len(self.greedy) == len(self.params) and not self.edited and not self.with_logprobs

    def fits(self, rows: Sequence[SampledRow]) -> bool:
        """Whether these columns were made from the parameters of `rows`, in this order."""
        if len(rows) != len(self.params):
            return False
        return all(row.params is p or row.params == p for row, p in zip(rows, self.params, strict=True))


def build_columns(rows: Sequence[SampledRow], vocab_size: int, device: str) -> Columns:
    params = tuple(row.params for row in rows)
    # a huge temperature is the uniform distribution; past this bound float32 would make it 0/0
    temperature = np.array([min(max(p.temperature, 1e-5), 1e30) for p in params], dtype=np.float64)
    top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], dtype=np.int64)
    top_p = np.array([min(p.top_p, 1.0) for p in params], dtype=np.float64)
    min_p = np.array([max(p.min_p, LEAST_MIN_P) if p.min_p > 0 else 0.0 for p in params], dtype=np.float64)
    greedy = np.array([p.greedy for p in params], dtype=bool)
    limits = Limits(temperature, top_k, top_p, min_p, vocab_size)
    weighed = limits.top_p_alone & (top_p >= CHECKED_TOP_P)
    masks = build_masks(params, vocab_size, device)
    penalised = tuple(index for index, p in enumerate(params) if has_penalties(p))
    return Columns(
        params=params,
        limits=limits,
        greedy=np.flatnonzero(greedy),
        weighed=np.flatnonzero(~greedy & weighed),
        ranked=np.flatnonzero(~greedy & ~weighed),
        masks=masks,
        penalised=penalised,
        edited=tuple(sorted(masks.edited.union(penalised))),
        with_logprobs=tuple(index for index, p in enumerate(params) if p.logprobs is not None),
    )
