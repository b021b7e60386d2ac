"""Masks over logits on the host, as lists of ids.

A grammar mostly allows a few ids, or all but a few (inside a string). So the shorter of the two lists is made where the mask is,
beside the forward pass, and what is left for the step is to write as many numbers: nothing of the size of [S, V] is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.stages.grammar import Mask

NEVER = np.float32("-inf")


@dataclass(frozen=True, slots=True)
class Cut:
    """What a mask does to one row: `token_ids` alone are allowed, or alone are barred."""

    token_ids: NDArray[np.int64]
    allows: bool

    @classmethod
    def of(cls, mask: Mask, vocab_size: int) -> Cut:
        bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
        allows = 2 * int(np.count_nonzero(bits)) <= vocab_size
        return cls(np.flatnonzero(bits if allows else ~bits), allows)

    def apply(self, row: NDArray[np.float32]) -> None:
        """Change `row` [V] in place."""
        if self.allows:
            values = row[self.token_ids]
            row.fill(NEVER)
            row[self.token_ids] = values
        else:
            row[self.token_ids] = NEVER


def apply_cuts(logits: torch.Tensor, indices: Sequence[int], cuts: Sequence[Cut]) -> None:
    """Rows `indices` of `logits` [S, V] on the host get -inf where their cut bars an id."""
    rows = logits.numpy()
    for index, cut in zip(indices, cuts, strict=True):
        cut.apply(rows[index])


def apply_masks(logits: torch.Tensor, indices: Sequence[int], masks: NDArray[np.int32]) -> None:
    """The same with masks [len(indices), W], on the device of the logits."""
    width = logits.shape[1]
    words = torch.from_numpy(masks).to(logits.device, non_blocking=True)
    places = torch.arange(32, device=logits.device, dtype=torch.int32)
    barred = (((words.unsqueeze(-1) >> places) & 1) == 0).flatten(1)[:, :width]
    if len(indices) == len(logits):
        logits.masked_fill_(barred, float("-inf"))
    else:
        index = torch.tensor(indices, device=logits.device)
        logits[index] = logits[index].masked_fill_(barred, float("-inf"))
