"""Logits processor `xtc`: now and then the likeliest tokens are left out, so that text goes on less predictably.

"Exclude Top Choices" by Philipp Emanuel Weidmann (p-e-w), text-generation-webui pull request 6335, 2024: with the chance
`probability`, of the tokens that are at least `threshold` likely only the least likely one stays. With fewer than two such
tokens nothing changes, so where only one token makes sense, it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.numbers import row_number
from plugins.logits_processors.settings import XtcParams, XtcSettings

_PURPOSE = 0x5854435F  # its numbers are not those of the draw


class Xtc:
    """For requests that send parameters; with `always`, for all. `probability: 0` asks for nothing.

    Likelihoods are the model's own, before temperature. Whether a position is one where tokens are left out depends on (seed,
    choice, position) alone. An end of sequence is never left out: texts would not end. Tokens that are as likely as the one that
    stays, stay too.
    """

    Settings = XtcSettings

    def __init__(self, settings: XtcSettings, context: LogitsProcessorContext):
        self._settings = settings
        self._eos = sorted(i for i in context.model.eos_token_ids if i < context.model.vocab_size)

    def state(self, row: SampledRow, params: BaseModel | None) -> XtcParams | None:
        if params is None and not self._settings.always:
            return None
        own = params if isinstance(params, XtcParams) else XtcParams()
        probability = self._settings.probability if own.probability is None else own.probability
        threshold = self._settings.threshold if own.threshold is None else own.threshold
        return XtcParams(probability=probability, threshold=threshold) if probability > 0 else None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[XtcParams]) -> None:
        for index, (row, rule) in enumerate(zip(rows, states, strict=True)):
            if row_number(row, _PURPOSE) < (rule.probability or 0.0):
                self._leave_out(logits[index], rule.threshold or 0.0)

    def _leave_out(self, logits: torch.Tensor, threshold: float) -> None:
        """`logits` [V] in place."""
        likely = torch.nonzero(logits.softmax(-1) >= threshold).flatten()
        if len(likely) < 2:
            return
        values = logits[likely]
        out = likely[values > values.min()]
        ends = logits[self._eos]
        logits[out] = float("-inf")
        logits[self._eos] = ends
