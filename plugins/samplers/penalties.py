"""Repetition, frequency and presence penalties, with token counts kept from step to step.

Repetition looks at prompt and output, the other two at the output only (rules of CTRL, Keskar et al. 2019, and of the
OpenAI API). Work and memory follow the number of different tokens of a request, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from core.batch import SampledRow
from core.request import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class TokenCounts:
    """Different tokens of one sequence and how often each occurs in its output. Grows by the step."""

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int):
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self._vocab_size = vocab_size
        self._last = -1
        unique = [i for i in dict.fromkeys(prompt_token_ids) if 0 <= i < vocab_size]
        self._slots = {token_id: slot for slot, token_id in enumerate(unique)}
        self._size = len(unique)
        self._ids = np.array(unique, dtype=np.int64)
        self._counts = np.zeros(self._size, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[n], each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[n] occurrences in the output, aligned with `ids`; 0 for tokens of the prompt alone."""
        return self._counts[: self._size]

    def matches(self, row: SampledRow) -> bool:
        """Whether the row's sequence is this one or a continuation of it."""
        known = self.num_output_tokens
        if self.num_prompt_tokens != len(row.prompt_token_ids) or known > len(row.output_token_ids):
            return False
        return known == 0 or row.output_token_ids[known - 1] == self._last

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if 0 <= token_id < self._vocab_size:
                slot = self._slot(token_id)  # first: it may replace the arrays
                self._counts[slot] += 1
        if token_ids:
            self._last = token_ids[-1]
        self.num_output_tokens += len(token_ids)

    def with_drafts(self, token_ids: Sequence[int]) -> TokenCounts:
        """A copy that has seen drafts as well: they are history for the rows after them."""
        copy = TokenCounts((), self._vocab_size)
        copy._slots = dict(self._slots)
        copy._size, copy._ids, copy._counts = self._size, self._ids.copy(), self._counts.copy()
        copy.extend(token_ids)
        return copy

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is not None:
            return slot
        if self._size == len(self._ids):
            room = max(self._size, 16)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        slot = self._slots[token_id] = self._size
        self._ids[slot] = token_id
        self._size += 1
        return slot


class Penalties:
    """Counts per request, and their effect on the logits."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._counts: dict[str, TokenCounts] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._counts.pop(request_id, None)

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], indices: Sequence[int]) -> None:
        """Change rows `indices` of `logits` [S, V] in place: one gather and one scatter for all of them."""
        seen = [self.counts_of(rows[index]) for index in indices]
        sizes = [len(counts.ids) for counts in seen]
        if not sum(sizes):
            return
        device = logits.device
        at_row = torch.from_numpy(np.repeat(np.array(indices, np.int64), sizes)).to(device)
        at_id = torch.from_numpy(np.concatenate([counts.ids for counts in seen])).to(device)
        counts = torch.from_numpy(np.concatenate([counts.counts for counts in seen])).to(device)
        params = [rows[index].params for index in indices]
        repetition = _repeat([p.repetition_penalty for p in params], sizes, device)
        frequency = _repeat([p.frequency_penalty for p in params], sizes, device)
        presence = _repeat([p.presence_penalty for p in params], sizes, device)
        values = logits[at_row, at_id]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts
        values = values - presence * (counts > 0)
        logits[at_row, at_id] = values

    def counts_of(self, row: SampledRow) -> TokenCounts:
        """Counts of everything known before the row; rebuilt where the kept ones belong to another history."""
        counts = self._counts.get(row.request_id)
        if counts is None or not counts.matches(row):
            counts = self._counts[row.request_id] = TokenCounts(row.prompt_token_ids, self._vocab_size)
        if counts.num_output_tokens < len(row.output_token_ids):
            counts.extend(row.output_token_ids[counts.num_output_tokens :])
        return counts.with_drafts(row.draft_token_ids) if row.draft_token_ids else counts


def _repeat(values: Sequence[float], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(device)
