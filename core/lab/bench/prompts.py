"""Synthetic prompts: seeded random token ids, so that every run and every machine sees the same lengths."""

from __future__ import annotations

import random

from core.lab.bench.calls import WorkItem

DRAWN = (100, 49_000)  # whatever the vocabulary: lengths that are drawn between ids are the same for every model


class Prompts:
    """Lengths and ids from one generator.

    Ids come from the middle of the vocabulary, which leaves special tokens out. `salt` shifts them all, and no length: prompts of
    another round have no prefix in common with these.
    """

    def __init__(self, seed: int, vocab_size: int, salt: int = 0):
        self._draw = random.Random(seed)
        self._salt = salt
        self._low = vocab_size // 10
        self._span = max(vocab_size * 9 // 10 - self._low, 1)

    def length(self, low: int, high: int) -> int:
        return self._draw.randint(low, high)

    def gap(self, rate: float) -> float:
        """Seconds until the next arrival of a Poisson process."""
        return self._draw.expovariate(rate)

    def ids(self, count: int) -> list[int]:
        draw, low, span, salt = self._draw, self._low, self._span, self._salt
        return [low + (draw.randint(*DRAWN) + salt) % span for _ in range(count)]

    def item(self, input_len: int, output_len: int) -> WorkItem:
        return WorkItem(self.ids(input_len), output_len)

    def items(self, count: int, input_len: int, output_len: int) -> list[WorkItem]:
        return [self.item(input_len, output_len) for _ in range(count)]
