"""How the end of a token sequence repeats what came before it: kept from token to token, without a look at all pairs.

Two sequences that are compared are the history and itself shifted by d tokens. `runs[d]` is how many of their newest tokens
are equal, one after another. A new token adds one to each run whose token it equals and ends the others: one vectorised pass
over the window, linear in it. The runs of a whole prompt are the Z-function of the reversed prompt (Gusfield, "Algorithms on
Strings, Trees and Sequences", 1997), also linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Continuations:
    """Tokens that would go on with a repetition, each once, and the length of the longest one."""

    token_ids: NDArray[np.int64]  # [n]
    lengths: Int32s  # [n]


NOTHING = Continuations(np.empty(0, np.int64), np.empty(0, np.int32))


class Repeats:
    """Runs over the newest `window` tokens of one growing history (None: all of it)."""

    def __init__(self, token_ids: Sequence[int], window: int | None):
        self._window = window
        kept = token_ids[-window:] if window else token_ids
        self._size = len(kept)
        self._ids = np.empty(max(2 * self._size, 64), np.int64)
        self._ids[: self._size] = kept
        self._runs = np.zeros(len(self._ids), np.int32)  # by shift; entry 0 is not used
        self._runs[: self._size] = _z_function(kept[::-1])

    def copy(self) -> Repeats:
        """Grows on its own."""
        other = Repeats.__new__(Repeats)
        other._window, other._size = self._window, self._size
        other._ids, other._runs = self._ids.copy(), self._runs.copy()
        return other

    def push(self, token_id: int) -> None:
        size = self._size
        if size == len(self._ids):
            self._make_room()
            size = self._size
        reach = size if self._window is None else min(size, self._window - 1)  # shifts within the window
        runs = self._runs[1 : reach + 1]
        runs += 1
        runs *= self._ids[size - reach : size][::-1] == token_id
        self._ids[size] = token_id
        self._size += 1

    def continuations(self, least: int, limit: int) -> Continuations:
        """What would go on with a repetition of at least `least` tokens. Of a repetition the newest `limit` tokens count, and
        none before the window."""
        if limit < least:
            return NOTHING
        width = self._size if self._window is None else min(self._size, self._window)
        shifts = np.flatnonzero(self._runs[1:width] >= least) + 1
        shifts = shifts[width - shifts >= least]  # tokens of the earlier place that lie in the window
        if not len(shifts):
            return NOTHING
        lengths = np.minimum(np.minimum(self._runs[shifts], width - shifts), limit).astype(np.int32)
        return _longest(self._ids[self._size - shifts], lengths)

    def _make_room(self) -> None:
        """Tokens that have left the window are dropped; what is left may fill half of the buffers."""
        kept = self._size if self._window is None else min(self._size, self._window)
        ids = np.empty(2 * kept, np.int64)
        ids[:kept] = self._ids[self._size - kept : self._size]
        runs = np.zeros(2 * kept, np.int32)
        runs[:kept] = self._runs[:kept]
        self._ids, self._runs, self._size = ids, runs, kept


class Breaks:
    """How many tokens have come since a text that no repetition reaches across. Texts may begin in one token and end in
    another."""

    def __init__(self, token_ids: Sequence[int], texts: Sequence[bytes], token_bytes: Callable[[int], bytes]):
        self._texts = tuple(texts)
        self._token_bytes = token_bytes
        self._reach = (
            max(map(len, texts), default=1) - 1
        )  # bytes before a token that may belong to a text that ends in it
        pieces = [token_bytes(token_id) for token_id in token_ids] if texts else []
        whole = b"".join(pieces)
        self._tail = whole[-self._reach :] if self._reach else b""
        self.since = _tokens_after(pieces, _last_end(whole, texts)) if texts else len(token_ids)

    def copy(self) -> Breaks:
        other = Breaks.__new__(Breaks)
        other._texts, other._token_bytes, other._reach = self._texts, self._token_bytes, self._reach
        other._tail, other.since = self._tail, self.since
        return other

    def push(self, token_id: int) -> None:
        self.since = 0 if self.ends_with(token_id) else self.since + 1
        if self._reach:
            self._tail = (self._tail + self._token_bytes(token_id))[-self._reach :]

    def ends_with(self, token_id: int) -> bool:
        """Whether one of the texts would end within this token."""
        if not self._texts:
            return False
        text = self._tail + self._token_bytes(token_id)
        return any(text.find(word, max(len(self._tail) - len(word) + 1, 0)) >= 0 for word in self._texts)


def _longest(token_ids: NDArray[np.int64], lengths: Int32s) -> Continuations:
    """Each token once, with the largest of its lengths."""
    order = np.lexsort((lengths, token_ids))
    token_ids, lengths = token_ids[order], lengths[order]
    last = np.append(token_ids[1:] != token_ids[:-1], True)
    return Continuations(token_ids[last], lengths[last])


def _last_end(whole: bytes, texts: Sequence[bytes]) -> int:
    """Where the last of `texts` ends in `whole`; 0: none is there."""
    found = ((whole.rfind(text), len(text)) for text in texts)
    return max((at + size for at, size in found if at >= 0), default=0)


def _tokens_after(pieces: Sequence[bytes], end: int) -> int:
    """How many pieces lie behind byte `end` of their concatenation; all of them where `end` is 0."""
    if end == 0:
        return len(pieces)
    start = sum(map(len, pieces))
    for count, piece in enumerate(reversed(pieces)):
        start -= len(piece)
        if start < end:
            return count
    return len(pieces)


def _z_function(text: Sequence[int]) -> list[int]:
    """Length of the longest common prefix of `text` and `text[shift:]`, by shift; entry 0 is 0. Linear in len(text)."""
    size = len(text)
    z = [0] * size
    left = right = 0  # [left, right): the rightmost stretch known to equal a prefix
    for shift in range(1, size):
        match = min(right - shift, z[shift - left]) if shift < right else 0
        while shift + match < size and text[match] == text[shift + match]:
            match += 1
        z[shift] = match
        if shift + match > right:
            left, right = shift, shift + match
    return z
