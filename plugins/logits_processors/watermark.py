"""Logits processor `watermark`: a bonus on the tokens that a key and the tokens before call green.

The "soft red list" of Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023. `green_list.py` says which
tokens those are, and detects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.green_list import GreenList
from plugins.logits_processors.settings import WatermarkSettings

CPU_CHUNK = 1 << 18  # numbers in one temporary, so that it stays in the processor's caches


class Watermark:
    """Adds `delta` to green logits; for requests that ask, with `always` for all, and then nobody can opt out.

    A row with fewer than `context_width` known tokens before it, or with ids in flight, is left alone; the detector scores
    neither. Greedy text is marked as well, where the bonus turns the order of tokens.
    """

    Settings = WatermarkSettings

    def __init__(self, settings: WatermarkSettings, context: LogitsProcessorContext):
        self._settings = settings
        self._green = GreenList(settings.key.get_secret_value(), settings.gamma, settings.context_width)
        hashes = self._green.hashes(np.arange(context.model.vocab_size)).view(np.int32)
        self._hashes = torch.from_numpy(hashes).to(context.device)  # [V]
        self._chunk = context.model.vocab_size * 1024 if "cuda" in context.device else CPU_CHUNK

    def state(self, row: SampledRow, params: BaseModel | None) -> str | None:
        return "on" if params is not None or self._settings.always else None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[str]) -> None:
        contexts = [self._context(row) for row in rows]
        marked = [index for index, context in enumerate(contexts) if context is not None]
        if not marked:
            return
        splits = [self._green.split(context) for context in contexts if context is not None]
        factors = _int32s([split.factor for split in splits], logits.device)
        # unsigned numbers in signed words: moved by 2**31, on both sides, their order is the same
        offsets = _int32s([split.offset - 2**31 for split in splits], logits.device)
        size = max(1, self._chunk // logits.shape[1])
        for start in range(0, len(marked), size):
            part = slice(start, start + size)
            green = (self._hashes * factors[part]).add_(offsets[part]) < self._green.threshold - 2**31
            _add(logits, marked[part], green, self._settings.delta)

    def _context(self, row: SampledRow) -> Sequence[int] | None:
        """The newest tokens before the row's position, None where they are not known."""
        width = self._settings.context_width
        if row.position > len(row.output_token_ids) + len(row.draft_token_ids):
            return None
        newest = (*row.prompt_token_ids[-width:], *row.output_token_ids[-width:], *row.draft_token_ids[-width:])[
            -width:
        ]
        return newest if len(newest) == width else None


def _int32s(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers modulo 2**32 as a column [n, 1] of signed words; products of int32 wrap."""
    words = np.array([value % 2**32 for value in values], np.uint32)
    return torch.from_numpy(words.view(np.int32)).unsqueeze(1).to(device)


def _add(logits: torch.Tensor, indices: Sequence[int], green: torch.Tensor, delta: float) -> None:
    """`delta` onto the green tokens of rows `indices` (ascending); `green` [n, V]."""
    first, count = indices[0], len(indices)
    if indices[-1] - first == count - 1:
        logits[first : first + count].add_(green, alpha=delta)
    else:
        logits.index_add_(0, torch.tensor(indices, device=logits.device), green.to(logits.dtype), alpha=delta)
