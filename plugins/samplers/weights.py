"""Weights of whole rows, proportional to exp(logit / temperature), their sums, and the draw in order of ids: no sort.

The inverse distribution function in two steps: blocks of neighbouring ids by their sums, then one block. A row's sums are
split alike in any batch and with any number of threads, so its numbers are bitwise the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.samplers.blocks import Blocks
from plugins.samplers.candidates import BLOCK
from plugins.samplers.draw import Floats, Ints, pick_weight

_LEAST_SHARE = 32768  # numbers: torch gives a thread no fewer
_VECTORS = 32  # numbers in the largest step of a loop over vectors (two of AVX-512)
_MAX_POWER = 100.0  # of 2: a best token's weight that float32 holds with room for the sum, at a precision of 3e-6
_REACHED = 1.0 - 2.0**-20  # weights as good as 1 by rounding


@dataclass(frozen=True, slots=True)
class Weights:
    """Of n rows, in blocks of neighbouring ids."""

    values: NDArray[np.float32]  # [n, number of blocks, BLOCK]
    sums: Floats  # [n, number of blocks]
    maxima: NDArray[np.float32]  # [n, number of blocks], up to rounding
    cumulative: Floats  # [n, number of blocks], of `sums`

    @property
    def totals(self) -> Floats:
        return self.cumulative[:, -1]

    def draw(self, which: Ints, numbers: Floats) -> Ints:
        """Token ids [k] of the rows `which` [k] of these, by as many `numbers` in (0, 1)."""
        cumulative = self.cumulative[which]
        targets = numbers * cumulative[:, -1]
        block = pick_weight(cumulative, targets)
        before = np.where(block > 0, cumulative[np.arange(len(which)), block - 1], 0.0)
        inside = self.values[which, block].astype(np.float64).cumsum(1)
        token_ids: Ints = block * BLOCK + pick_weight(inside, targets - before)
        return token_ids


class Scales:
    """Makes weights, in memory that it keeps: to get [n, V] anew takes as long as what is computed in it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def weigh(
        self, logits: torch.Tensor, rows: Ints, blocks: Blocks, temperature: Floats, min_p: Floats | None = None
    ) -> Weights:
        """Of `rows` [n] (ascending) of `logits` [S, V]; good until the next call. With `min_p` [n], above 0, in units of the
        least weight that is kept, and 0 below it.

        Powers of 2 take a third of the time of those of e. The best logit is taken off first where the powers would get large:
        at a temperature of 1e-5 float32 could not tell neighbours apart.
        """
        values, scale = self._room(len(rows), blocks.num_blocks), math.log2(math.e) / temperature
        used, values[:, logits.shape[1] :] = values[:, : logits.shape[1]], float("-inf")
        maxima = blocks.maxima[rows]
        peaks = maxima.max(1)
        shifts = np.where(np.abs(peaks * scale) <= _MAX_POWER, 0.0, peaks)
        own = logits
        if len(rows) < len(logits):
            own = torch.index_select(logits, 0, torch.from_numpy(rows), out=used)
        if shifts.any():
            own = torch.sub(own, _column(shifts), out=used)
        torch.mul(own, _column(scale), out=used)
        if min_p is not None:
            used.sub_(_column((peaks - shifts) * scale + np.log2(min_p)))
        _exp2(values)
        if min_p is not None:
            torch.nn.functional.threshold(used, _REACHED, 0.0, inplace=True)
        shaped = values.view(len(rows), -1, BLOCK)
        sums = shaped.sum(-1).double()
        best = np.exp2((maxima - _column(shifts).numpy()) * _column(scale).numpy())
        return Weights(shaped.numpy(), sums.numpy(), best, sums.cumsum(1).numpy())

    def _room(self, num_rows: int, num_blocks: int) -> torch.Tensor:
        size = num_rows * num_blocks * BLOCK
        if self._memory.numel() < size:
            self._memory = torch.from_numpy(np.empty(size, np.float32))  # which asks for large pages
        return self._memory[:size].view(num_rows, -1)


def _exp2(values: torch.Tensor) -> None:
    """In place. torch works on vectors of numbers, and on what is left at the end of a thread's share by another function, whose
    last bit may differ: so shares must be whole vectors, or a number would depend on the rows beside it."""
    size = values.numel()
    num_shares = min(torch.get_num_threads(), -(-size // _LEAST_SHARE))
    if -(-size // num_shares) % _VECTORS == 0:
        values.exp2_()
    else:
        for part in torch.split(values.view(-1), _LEAST_SHARE):
            part.exp2_()


def _column(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).unsqueeze(1)
