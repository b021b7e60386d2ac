"""Logits in blocks of neighbouring ids, on the host, and the tokens of a row above a floor, best first, without a sort of [S, V].

A block whose maximum lies below the floor holds none of them, so only the other blocks are read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.samplers.candidates import BLOCK
from plugins.samplers.draw import Ints

Logits = NDArray[np.float32]
_PAST = np.iinfo(np.int64).max  # key of no token


class Ranked(NamedTuple):
    """Tokens of n rows, best first (larger logit, then lower id); rows with fewer than C are filled with -inf."""

    values: Logits  # [n, C]
    ids: Ints  # [n, C]


@dataclass(frozen=True, slots=True)
class Blocks:
    values: Logits  # [S * number of blocks, BLOCK]; past the last id -inf
    maxima: Logits  # [S, number of blocks]

    @classmethod
    def of(cls, logits: torch.Tensor, maxima: torch.Tensor) -> Blocks:
        """`logits` [S, V] with the maxima of its blocks. Shares memory where it can."""
        missing = -logits.shape[1] % BLOCK
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return cls(logits.reshape(-1, BLOCK).cpu().numpy(), maxima.cpu().numpy())

    @property
    def num_blocks(self) -> int:
        return int(self.maxima.shape[1])

    def best_above(self, rows: Ints, floors: Logits) -> Ranked:
        """All tokens of `rows` [n] whose logit is at least `floors` [n]; each row has one."""
        owner, block = np.divmod(np.flatnonzero(self.maxima[rows] >= floors[:, None]), self.num_blocks)
        values = self.values[rows[owner] * self.num_blocks + block]
        at = np.flatnonzero(values >= floors[owner, None])
        found, place = at // BLOCK, at % BLOCK
        keys = _keys(values.ravel()[at], block[found] * BLOCK + place)
        return _in_rows(keys, owner[found], len(rows))

    def kth_best(self, rows: Ints, counts: Ints) -> Logits:
        """For each row [n] a logit that at least `counts` [n] tokens reach, and few more: those of as many groups of blocks."""
        floors = np.full(len(rows), -np.inf, np.float32)
        few = np.flatnonzero(counts <= self.num_blocks)
        if len(few):
            groups = self.maxima[rows[few]]
            while (half := groups.shape[1] // 2) >= 2 * counts[few].max():  # still many more groups than tokens
                groups = np.maximum(groups[:, :half], groups[:, half : 2 * half])
            ordered = np.sort(groups, axis=1)
            floors[few] = ordered[np.arange(len(few)), groups.shape[1] - counts[few]]
        return floors


def _in_rows(keys: Ints, owner: Ints, num_rows: int) -> Ranked:
    """Keys of tokens, with the row of each (ascending), as sorted rows."""
    counts = np.bincount(owner, minlength=num_rows)
    starts = counts.cumsum() - counts
    padded = np.full((num_rows, int(counts.max())), _PAST)
    padded[owner, np.arange(len(keys)) - starts[owner]] = keys
    padded.sort(axis=1)
    values = _ordered(~(padded >> 32).astype(np.int32)).view(np.float32)
    return Ranked(np.where(padded == _PAST, np.float32(-np.inf), values), padded & 0xFFFFFFFF)


def _keys(values: Logits, ids: Ints) -> Ints:
    """int64 keys whose ascending order is (float32 value descending, id ascending)."""
    bits = (values + np.float32(0.0)).view(np.int32)  # + 0.0: -0.0 and 0.0 are equal
    keys: Ints = (~_ordered(bits)).astype(np.int64) << 32 | ids
    return keys


def _ordered(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Float32 bits <-> int32 of the same order (its own inverse): flip the magnitude bits of negative numbers."""
    ordered: NDArray[np.int32] = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered
