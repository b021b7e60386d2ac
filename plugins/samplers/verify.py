"""What both samplers share around the choice of a token: picking rows, bad rows, and the check of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from core.batch import SampledRow

NO_TOKEN = -1  # id of a bad row: equals no draft, so acceptance ends there


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """Row indices whose tokens count, per request, and the requests whose last counted row is bad."""

    rows: Mapping[str, tuple[int, ...]]
    errors: Mapping[str, str]


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


def bad_rows(peaks: torch.Tensor, stage: str) -> dict[int, str]:
    """Rows whose largest logit is not a finite number. `peaks` [S]; NaN anywhere in a row makes its peak NaN."""
    bad: dict[int, str] = {}
    finite = torch.isfinite(peaks)
    if bool(finite.all()):
        return bad
    for row in torch.nonzero(~finite).flatten().tolist():
        peak = float(peaks[row])
        if peak == float("-inf"):
            bad[row] = f"no token can be sampled {stage}: every logit is -inf (masked)"
        else:
            bad[row] = f"the model's logits hold {'NaN' if peak != peak else '+inf'}; no token can be sampled"
    return bad


def keep_accepted(rows: Sequence[SampledRow], token_ids: Sequence[int], bad: Mapping[int, str]) -> AcceptedRows:
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
    errors = {request_id: bad[indices[-1]] for request_id, indices in kept.items() if indices[-1] in bad}
    return AcceptedRows(
        {request_id: indices for request_id, indices in kept.items() if request_id not in errors}, errors
    )
