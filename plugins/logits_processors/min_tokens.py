"""Logits processor `min_tokens`: no end of sequence before so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.settings import MinTokensSettings

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Ends:
    """Ids that end a request, and how many tokens come first."""

    ids: tuple[int, ...]
    min_tokens: int


class MinTokens:
    """While a request has fewer than `min_tokens` tokens, its `stop_token_ids` and EOS are masked; EOS not with `ignore_eos`,
    where it ends nothing. Stop strings are the detokenizer's, which counts as well.

    A grammar whose text is whole can only end: there it does, however many tokens there are.
    """

    Settings = MinTokensSettings

    def __init__(self, settings: MinTokensSettings, context: LogitsProcessorContext):
        self._eos = context.model.eos_token_ids
        self._vocab_size = context.model.vocab_size

    def state(self, row: SampledRow, params: BaseModel | None) -> Ends | None:
        wanted = row.params
        if row.position >= wanted.min_tokens:
            return None
        ids = {*wanted.stop_token_ids, *(() if wanted.ignore_eos else self._eos)}
        known = sorted(i for i in ids if 0 <= i < self._vocab_size)  # an index must never reach a neighbouring row
        return Ends(tuple(known), wanted.min_tokens) if known else None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[Ends]) -> Sequence[int] | None:
        at_row: list[int] = []
        at_id: list[int] = []
        finished = []
        for index, (row, ends) in enumerate(zip(rows, states, strict=True)):
            if row.position >= ends.min_tokens:
                finished.append(index)
                continue
            at_row += [index] * len(ends.ids)
            at_id += ends.ids
        if at_row:
            places = torch.tensor([at_row, at_id], device=logits.device)
            before = logits[places[0], places[1]]
            logits[places[0], places[1]] = NEVER
            whole = [index for index in dict.fromkeys(at_row) if rows[index].params.grammar is not None]
            if whole and bool((ended := torch.isneginf(logits[whole].amax(-1))).any()):
                again = torch.isin(places[0], torch.tensor(whole, device=logits.device)[ended])
                logits[places[0][again], places[1][again]] = before[again]
        return finished
