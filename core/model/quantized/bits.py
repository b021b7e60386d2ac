"""Small unsigned integers out of 32-bit words: one little-endian stream of bits, the first value in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` values; the last one may be filled up."""
    return -(-count * bits // WORD)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., words_for(count, bits)] -> uint8 [..., count], along the last axis."""
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
        values = (words[..., None] >> shifts) & (
            (1 << bits) - 1
        )  # the shift keeps the sign, and the mask takes it away
        return values.flatten(-2)[..., :count].to(torch.uint8)
    first = torch.arange(count) * bits
    index, shift = first // WORD, first % WORD
    wide = words.to(torch.int64) & 0xFFFFFFFF
    low = wide[..., index] >> shift
    high = wide[..., (index + 1).clamp_max(words.shape[-1] - 1)] << (WORD - shift)  # of values that cross a border
    return ((low | high) & ((1 << bits) - 1)).to(torch.uint8)
