"""Which tokens at the end of a text are final, whatever text follows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from core.stages.grammar import Vocabulary


class TokenEnds:
    def __init__(self, vocabulary: Vocabulary):
        special = vocabulary.special_ids
        self._tokens = vocabulary.tokens
        self._sorted = sorted(token for at, token in enumerate(vocabulary.tokens) if token and at not in special)
        self._longest = max(map(len, self._sorted), default=0)

    def settled(self, ids: Sequence[int]) -> Sequence[int]:
        """`ids` up to the first whose bytes, with all that follow, begin a longer token."""
        tail, kept = b"", len(ids)
        for at in range(len(ids) - 1, -1, -1):
            tail = self._tokens[ids[at]] + tail
            if len(tail) >= self._longest:
                break
            if self._begins_longer(tail):
                kept = at
        return ids[:kept]

    def _begins_longer(self, data: bytes) -> bool:
        at = bisect_right(self._sorted, data)
        return at < len(self._sorted) and self._sorted[at].startswith(data)
