"""Sampling parameters of S rows as columns, made once for as long as the set of rows stays the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.batch import SampledRow
from core.request import SamplingParams
from plugins.samplers.masks import Masks, build_masks
from plugins.samplers.penalties import has_penalties
from plugins.samplers.truncate import Limits

_SMALLEST_BUCKET = 64


@dataclass(frozen=True, slots=True)
class Columns:
    params: tuple[SamplingParams, ...]  # kept alive, so that identity is a safe comparison
    limits: Limits  # [S]
    greedy: NDArray[np.int64]  # row indices, likewise below; these three parts are disjoint and cover all rows
    whole: NDArray[np.int64]  # random over the whole vocabulary
    truncated: Mapping[int, NDArray[np.int64]]  # by the number of candidates to fetch first
    masks: Masks
    penalised: tuple[int, ...]
    edited: tuple[int, ...]  # rows whose logits the sampler itself changes before the token is chosen
    with_logprobs: tuple[int, ...]

    def fits(self, rows: Sequence[SampledRow]) -> bool:
        """Whether these columns were made from the parameters of `rows`, in this order."""
        if len(rows) != len(self.params):
            return False
        return all(row.params is p or row.params == p for row, p in zip(rows, self.params, strict=True))


def build_columns(rows: Sequence[SampledRow], vocab_size: int, first_candidates: int, device: str) -> Columns:
    params = tuple(row.params for row in rows)
    # a huge temperature is the uniform distribution; past this bound float32 would make it 0/0
    temperature = np.array([min(max(p.temperature, 1e-5), 1e30) for p in params], dtype=np.float64)
    top_k = np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], dtype=np.int64)
    top_p = np.array([min(p.top_p, 1.0) for p in params], dtype=np.float64)
    min_p = np.array([max(p.min_p, 0.0) for p in params], dtype=np.float64)
    greedy = np.array([p.greedy for p in params], dtype=bool)
    cut = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
    masks = build_masks(params, vocab_size, device)
    penalised = tuple(index for index, p in enumerate(params) if has_penalties(p))
    return Columns(
        params=params,
        limits=Limits(temperature, top_k, top_p, min_p),
        greedy=np.flatnonzero(greedy),
        whole=np.flatnonzero(~greedy & ~cut),
        truncated=_buckets(top_k, np.flatnonzero(~greedy & cut), vocab_size, first_candidates),
        masks=masks,
        penalised=penalised,
        edited=tuple(sorted(masks.edited.union(penalised))),
        with_logprobs=tuple(index for index, p in enumerate(params) if p.logprobs is not None),
    )


def _buckets(
    top_k: NDArray[np.int64], rows: NDArray[np.int64], vocab_size: int, first_candidates: int
) -> dict[int, NDArray[np.int64]]:
    """Rows by candidates to fetch: a row with a small top_k does not pay for a neighbour with a large one."""
    wanted: dict[int, list[int]] = {}
    for row in rows.tolist():
        count = min(first_candidates, vocab_size) if top_k[row] == vocab_size else _bucket(int(top_k[row]), vocab_size)
        wanted.setdefault(count, []).append(row)
    return {count: np.array(indices, dtype=np.int64) for count, indices in wanted.items()}


def _bucket(top_k: int, vocab_size: int) -> int:
    size = _SMALLEST_BUCKET
    while size < top_k:
        size *= 4
    return min(size, vocab_size)
