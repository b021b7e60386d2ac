"""Masks and bias of single tokens: allowed ids, bad words, logit bias.

All but the bias set logits to -inf, and a finite bias leaves -inf alone, so their order among themselves does not
matter. They come before the penalties, as in vLLM. Ids outside the vocabulary are skipped here: refusing them is the
renderer's part, and an index must never reach a neighbouring row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from core.batch import SampledRow
from core.request import SamplingParams

Phrase = tuple[int, ...]
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Cells:
    """Places in [S, V]: `rows` and `ids` int64 [n], `values` float32 [n] where each place has its own."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Masks:
    """What the parameters of S rows ask for, as index tensors; made once for an unchanged set of rows."""

    allowed: tuple[tuple[int, torch.Tensor], ...]
    bias: Cells | None
    banned: Cells | None  # bad words of one token: always masked
    phrases: tuple[
        tuple[int, tuple[Phrase, ...]], ...
    ]  # bad words of several tokens: the last is masked after the rest
    edited: frozenset[int]  # rows that any of these may change

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """Change `logits` [S, V] in place."""
        for row, ids in self.allowed:
            values = logits[row, ids]
            logits[row].fill_(NEVER)
            logits[row, ids] = values
        if self.banned is not None:
            logits[self.banned.rows, self.banned.ids] = NEVER
        for row, phrases in self.phrases:
            last = banned_next(phrases, rows[row])
            if last:
                logits[row, torch.tensor(last, device=logits.device)] = NEVER
        if self.bias is not None and self.bias.values is not None:
            logits[self.bias.rows, self.bias.ids] += self.bias.values


def banned_next(phrases: Sequence[Phrase], row: SampledRow) -> list[int]:
    """Last ids of the phrases whose other ids are the newest of the output (and drafts).

    With ids in flight the newest are unknown, and then no phrase matches; see `needs_history`.
    """
    known = len(row.output_token_ids) + len(row.draft_token_ids)
    if row.position > known:
        return []
    longest = max(len(phrase) for phrase in phrases) - 1
    tail = (*row.output_token_ids[-longest:], *row.draft_token_ids)
    return [phrase[-1] for phrase in phrases if tail[max(len(tail) - len(phrase) + 1, 0) :] == phrase[:-1]]


def build_masks(params: Sequence[SamplingParams], vocab_size: int, device: str) -> Masks:
    allowed, phrases = [], []
    biased: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int, float]] = []
    for row, p in enumerate(params):
        if p.allowed_token_ids is not None:
            allowed.append((row, _ids(p.allowed_token_ids, vocab_size, device)))
        biased += [(row, i, float(b)) for i, b in p.logit_bias.items() if 0 <= i < vocab_size]
        words = [word for word in p.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        banned += [(row, word[0], NEVER) for word in words if len(word) == 1]
        if any(len(word) > 1 for word in words):
            phrases.append((row, tuple(word for word in words if len(word) > 1)))
    edited = {r for r, _ in allowed} | {c[0] for c in (*biased, *banned)} | {r for r, _ in phrases}
    bias, ban = _cells(biased, device), _cells(banned, device)
    return Masks(tuple(allowed), bias, ban, tuple(phrases), frozenset(edited))


def _ids(ids: Iterable[int], vocab_size: int, device: str) -> torch.Tensor:
    return torch.tensor(sorted({i for i in ids if 0 <= i < vocab_size}), dtype=torch.int64, device=device)


def _cells(places: Sequence[tuple[int, int, float]], device: str) -> Cells | None:
    if not places:
        return None
    rows, ids, values = zip(*places, strict=True)
    return Cells(
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )
