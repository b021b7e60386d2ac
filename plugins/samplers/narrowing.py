"""What grammars and logits processors leave of rows: before any mask or penalty of a sampler's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.batch import SampledRow, SamplingMetadata
from core.stages.sampler import SamplerContext
from plugins.samplers.bad_rows import After, BadRows, bad_among
from plugins.samplers.verify import mask_blank


@dataclass(frozen=True, slots=True)
class Concerned:
    """Indices into the S rows, ascending: which processors touch, and which have a grammar."""

    touched: Sequence[int]
    constrained: Sequence[int]


class Narrowing:
    """Processors choose among what a grammar allows, and what they raise besides stays barred."""

    def __init__(self, context: SamplerContext, blank: slice | torch.Tensor | None):
        """`blank`: ids that are never sampled (`verify.blank_index`)."""
        self._processors = context.processors
        self._grammar = context.grammar
        self._blank = blank

    def concerned(self, rows: Sequence[SampledRow]) -> Concerned:
        return Concerned(self._processors.touches(rows), self._grammar.touches(rows))

    def leaves_argmax(self, metadata: SamplingMetadata) -> bool:
        """Whether rows come as the model gave them, one for each request, and no other row is wanted."""
        rows = metadata.rows
        if not rows or metadata.prompt_rows or self._blank is not None or any(row.draft_token_ids for row in rows):
            return False
        which = self.concerned(rows)
        return not which.touched and not which.constrained

    def apply(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], which: Concerned, edited: Sequence[int] = ()
    ) -> BadRows:
        """`logits` [S, V] in place, in which blank ids are masked. Bad ones are looked for first, where a mask cannot hide them;
        `edited`: rows that are edited further, so that later looks would be too late."""
        touched, constrained, bad = which.touched, which.constrained, BadRows()
        bad.add(bad_among(logits, sorted({*edited, *touched, *constrained})), After.MODEL)
        if constrained:
            bad.add_told(self._grammar.apply(logits, rows), After.GRAMMAR)
            bad.add(bad_among(logits, sorted({*constrained}.intersection((*edited, *touched)))), After.GRAMMAR)
        if touched:
            self._processors.apply(logits, rows)
            mask_blank(logits, self._blank)
            if not {*touched}.isdisjoint(constrained):
                self._grammar.apply(logits, rows)
            bad.add(bad_among(logits, sorted({*touched}.intersection(edited))), After.PROCESSORS)
        return bad
