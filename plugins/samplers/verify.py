"""What both samplers share around the choice of a token: picking rows, bad rows, and the check of drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.batch import SampledRow
from core.stages.grammar import GrammarMask

NO_TOKEN = -1  # id of a bad row: equals no draft, so acceptance ends there


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """Row indices whose tokens count, per request, and the bad row at which a request's tokens end."""

    rows: Mapping[str, tuple[int, ...]]
    failed: Mapping[str, int]


def sampled_logits(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Rows `indices` of [R, V] as float32 [S, V]; a view where they are contiguous, since editing in place is allowed."""
    first, count = indices[0], len(indices)
    if tuple(indices) == tuple(range(first, first + count)):
        return logits[first : first + count].float()
    return logits[torch.tensor(indices, device=logits.device)].float()


def blank_index(unusable: frozenset[int], vocab_size: int, device: str) -> slice | torch.Tensor | None:
    """Columns that are never sampled (padding rows of the vocabulary), as a slice where they are one range."""
    ids = sorted(i for i in unusable if 0 <= i < vocab_size)
    if not ids:
        return None
    if ids[-1] - ids[0] == len(ids) - 1:
        return slice(ids[0], ids[-1] + 1)
    return torch.tensor(ids, device=device)


def mask_blank(rows: torch.Tensor, blank: slice | torch.Tensor | None) -> None:
    """Ids that are never sampled, in place; again after the logits processors, whatever those write."""
    if blank is not None:
        rows[:, blank] = float("-inf")


def take_rows(matrix: torch.Tensor, which: NDArray[np.int64]) -> torch.Tensor:
    """Rows `which` (ascending, each once), without a copy when that is all of them."""
    return matrix if len(which) == matrix.shape[0] else matrix[torch.from_numpy(which).to(matrix.device)]


def keep_accepted(rows: Sequence[SampledRow], token_ids: Sequence[int], bad: Collection[int]) -> AcceptedRows:
    """Accept a draft while the token sampled before it equals it.

    Every row draws with its own (seed, choice, position), so the accepted ids are exactly those of plain decoding.
    A bad row matters only where acceptance reaches it.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for index, row in enumerate(rows):
        before = kept.get(row.request_id)
        if before is None:
            kept[row.request_id] = (index,)
        elif len(row.draft_token_ids) == len(before) and row.draft_token_ids[-1] == token_ids[before[-1]]:
            kept[row.request_id] = (*before, index)
    failed = {request_id: indices[-1] for request_id, indices in kept.items() if indices[-1] in bad}
    return AcceptedRows(
        {request_id: indices for request_id, indices in kept.items() if request_id not in failed}, failed
    )


def with_following(
    chosen: Mapping[str, tuple[int, ...]], kept: AcceptedRows, rows: Sequence[SampledRow], grammar: GrammarMask
) -> dict[str, tuple[int, ...]]:
    """The ids drawn for each request, and those that its grammar forces after them."""
    return {
        request_id: ids
        if (row := rows[kept.rows[request_id][0]]).params.grammar is None
        else grammar.following(row, ids)
        for request_id, ids in chosen.items()
    }
