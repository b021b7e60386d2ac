"""Logits processor `dry`: a penalty on tokens that would go on with a repetition, growing with its length.

"Don't Repeat Yourself" by Philipp Emanuel Weidmann (p-e-w), text-generation-webui pull request 5677, 2024; with texts as
sequence breakers that may span tokens, as in llama.cpp's sampler. Where the last L tokens have occurred before, the token
that followed them there loses `multiplier * base ** (L - allowed_length)` logits, if L is at least `allowed_length`. L does
not reach back across a sequence breaker, and a token in which one ends is never penalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.repeats import Breaks, Repeats
from plugins.logits_processors.settings import DryParams, DrySettings

MAX_GROWTH = 1e30  # of base ** …: times the largest multiplier it is still a finite float32


@dataclass(frozen=True, slots=True)
class Rule:
    """One request's parameters."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int | None
    sequence_breakers: tuple[bytes, ...]

    def penalties(self, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        longest = math.log(MAX_GROWTH) / math.log(self.base) if self.base > 1.0 else math.inf
        exponents = np.minimum(lengths - self.allowed_length, longest)
        found: NDArray[np.float32] = (self.multiplier * self.base**exponents).astype(np.float32)
        return found


class History:
    """One request's settled tokens, as far as `advance` has seen them."""

    def __init__(self, rule: Rule, row: SampledRow, token_bytes: Callable[[int], bytes]):
        known = [*row.prompt_token_ids, *row.output_token_ids]
        self.rule = rule
        self.num_output_tokens = len(row.output_token_ids)
        self.repeats = Repeats(known, rule.last_n)
        self.breaks = Breaks(known[-rule.last_n :] if rule.last_n else known, rule.sequence_breakers, token_bytes)

    def advance(self, row: SampledRow) -> None:
        """Up to the row's settled output, also where it is there already (a step that is run again)."""
        new = row.output_token_ids[self.num_output_tokens :]
        for token_id in new:
            self.repeats.push(token_id)
            self.breaks.push(token_id)
        self.num_output_tokens += len(new)

    def after_drafts(self, token_ids: Sequence[int]) -> tuple[Repeats, Breaks]:
        """With drafts, which may be rejected, as more history."""
        if not token_ids:
            return self.repeats, self.breaks
        repeats, breaks = self.repeats.copy(), self.breaks.copy()
        for token_id in token_ids:
            repeats.push(token_id)
            breaks.push(token_id)
        return repeats, breaks


class Dry:
    """For requests that send parameters; with `always`, for all. `multiplier: 0` asks for nothing.

    While ids are in flight (position beyond the known output) the end of the history is unknown, and nothing is penalised.
    """

    Settings = DrySettings

    def __init__(self, settings: DrySettings, context: LogitsProcessorContext):
        self._settings = settings
        self._vocab_size = context.model.vocab_size
        self._token_bytes = context.load_tokenizer().token_bytes  # now: a first request must not hold a step up

    def state(self, row: SampledRow, params: BaseModel | None) -> History | None:
        if params is None and not self._settings.always:
            return None
        rule = self._rule(params if isinstance(params, DryParams) else DryParams())
        return History(rule, row, self._token_bytes) if rule.multiplier > 0 else None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[History]) -> None:
        """One scatter for all rows."""
        at_row, at_id, penalties = [], [], []
        for index, (row, history) in enumerate(zip(rows, states, strict=True)):
            history.advance(row)
            if row.position > len(row.output_token_ids) + len(row.draft_token_ids):
                continue
            token_ids, values = self._penalised(history, row.draft_token_ids)
            if len(token_ids):
                at_row.append(np.full(len(token_ids), index))
                at_id.append(token_ids)
                penalties.append(values)
        if at_row:
            device = logits.device
            places = (
                torch.from_numpy(np.concatenate(at_row)).to(device),
                torch.from_numpy(np.concatenate(at_id)).to(device),
            )
            logits[places] -= torch.from_numpy(np.concatenate(penalties)).to(device)

    def _penalised(self, history: History, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids, each once, and what each loses."""
        repeats, breaks = history.after_drafts(drafts)
        found = repeats.continuations(history.rule.allowed_length, breaks.since)
        kept = [0 <= i < self._vocab_size and not breaks.ends_with(i) for i in found.token_ids.tolist()]
        return found.token_ids[kept], history.rule.penalties(found.lengths[kept])

    def _rule(self, params: DryParams) -> Rule:
        own = {**self._settings.model_dump(exclude={"always"}), **params.model_dump(exclude_none=True)}
        breakers = tuple(text.encode() for text in own.pop("sequence_breakers"))
        return Rule(**own, sequence_breakers=breakers)
