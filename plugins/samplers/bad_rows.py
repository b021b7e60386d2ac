"""Rows without a token to sample: whose fault each is, as an error of its request.

A row is looked at before anything edits it, where a mask cannot hide what the model did; after the logits processors; and
after the sampler's own masks. The first finding counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from core.batch import SampledRow
from core.errors import NO_TOKEN_LEFT
from core.request import SamplingParams
from core.stages.logits_processor import LogitsChain
from plugins.samplers.verify import AcceptedRows, take_rows

GRAMMAR = "grammar"


class After(StrEnum):
    """What has edited the row by then, in the words of the error message."""

    MODEL = "at this position"
    PROCESSORS = "after the logits processors"
    GRAMMAR = "where the grammar stands"
    MASKS = "with these sampling parameters"


@dataclass(frozen=True, slots=True)
class Finding:
    after: After
    peak: float = float("-inf")  # the row's largest logit: NaN, +inf or -inf
    told: str = ""  # by what edited the row: the reason as it is

    @property
    def is_empty(self) -> bool:
        """Every logit is masked, by what has no reason of its own."""
        return not self.told and self.after in (After.PROCESSORS, After.MASKS) and self.peak == float("-inf")

    @property
    def reason(self) -> str:
        if self.told:
            return self.told
        if self.peak == float("-inf"):
            return f"no token can be sampled {self.after}: every logit is -inf (masked)"
        whose = "the" if self.after is After.PROCESSORS else "the model's"
        return f"{whose} logits hold {'NaN' if self.peak != self.peak else '+inf'}; no token can be sampled"


class BadRows(Collection[int]):
    """Indices into the S rows, each with its first finding."""

    def __init__(self) -> None:
        self._found: dict[int, Finding] = {}

    def __contains__(self, row: object) -> bool:
        return row in self._found

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, peaks: Mapping[int, float], after: After, only: Collection[int] | None = None) -> None:
        for row, peak in peaks.items():
            if only is None or row in only:
                self._found.setdefault(row, Finding(after, peak))

    def add_told(self, reasons: Mapping[int, str], after: After) -> None:
        for row, reason in reasons.items():
            self._found.setdefault(row, Finding(after, told=reason))

    def errors(self, kept: AcceptedRows, rows: Sequence[SampledRow], chain: LogitsChain) -> dict[str, str]:
        """By request id. A row matters only where acceptance reaches it, so nobody is blamed before."""
        return {request_id: self._error(rows[row], self._found[row], chain) for request_id, row in kept.failed.items()}

    def _error(self, row: SampledRow, finding: Finding, chain: LogitsChain) -> str:
        names = _narrowing(row.params)
        by_processors = finding.after is After.PROCESSORS
        if finding.is_empty and (len(names) > 1 and names[0] == GRAMMAR if by_processors else names):
            return f"{NO_TOKEN_LEFT} at position {row.position}: its {' and '.join(names)} allow none together"
        return finding.reason + (chain.blame(row) if by_processors else "")


def _narrowing(params: SamplingParams) -> list[str]:
    """What a request bars tokens with, in the order in which it is applied."""
    named = [GRAMMAR] if params.grammar is not None else []
    named += [f"logits_processors.{name}" for name in params.extra]
    own = ("min_tokens", "allowed_token_ids", "logit_bias", "bad_words")
    return named + [name for name in own if getattr(params, name)]


def bad_peaks(peaks: torch.Tensor) -> dict[int, float]:
    """Rows whose largest logit is not a finite number, with it. `peaks` [S]; NaN anywhere in a row makes its peak NaN."""
    values = peaks.cpu().numpy()
    finite = np.isfinite(values)
    if finite.all():
        return {}
    return {int(row): float(values[row]) for row in np.flatnonzero(~finite)}


def bad_among(logits: torch.Tensor, indices: Sequence[int]) -> dict[int, float]:
    """As `bad_peaks`, of the rows `indices` (ascending) of [S, V] alone."""
    if not indices:
        return {}
    found = bad_peaks(take_rows(logits, np.array(indices)).amax(-1))
    return {indices[index]: peak for index, peak in found.items()}
