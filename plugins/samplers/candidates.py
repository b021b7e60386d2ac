"""The best tokens of each row in a stable order (larger logit first, then smaller id), without a sort of [S, V].

One vectorised pass takes the maximum of every block of `BLOCK` neighbouring ids. The best `count` tokens of a row lie
within its best `count` blocks, ordered by (maximum, block index): any other block is beaten by `count` tokens. So only
those blocks are read again. The same maxima give the argmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 64
_LOW = 0xFFFFFFFF


class Candidates(NamedTuple):
    values: torch.Tensor  # [S, count] float32, descending
    ids: torch.Tensor  # [S, count] int64; ascending where values are equal


def block_maxima(rows: torch.Tensor) -> torch.Tensor:
    """[S, V] -> [S, ceil(V / BLOCK)]; NaN in a block makes its maximum NaN."""
    width = rows.shape[1]
    whole = width // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(rows[:, :whole].view(len(rows), -1, BLOCK).amax(-1))
    if whole < width:
        parts.append(rows[:, whole:].amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def first_maximum(rows: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Argmax [S] int64 of [S, V] by way of `maxima`; the lowest id among equals, as torch.argmax."""
    found = take_blocks(rows, maxima.argmax(-1, keepdim=True))
    return found.ids.gather(1, found.values.argmax(-1, keepdim=True)).squeeze(1)


def top_candidates(rows: torch.Tensor, maxima: torch.Tensor, count: int) -> Candidates:
    """The best min(count, V) tokens of each row, in order. NaN-free rows only (others get any ids)."""
    width = rows.shape[1]
    count = min(count, width)
    num_blocks = maxima.shape[1]
    if 2 * count < num_blocks:
        blocks = torch.arange(num_blocks, device=rows.device)
        found = take_blocks(rows, sort_keys(maxima, blocks).topk(count).indices)
    else:
        found = Candidates(rows, torch.arange(width, device=rows.device))
    keys = sort_keys(found.values, found.ids)
    best = keys.sort(descending=True).values if count == width else keys.topk(count).values
    return Candidates(_values(best), _LOW - (best & _LOW))


def sort_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys whose descending order is (float32 value descending, id ascending)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    return (_ordered(bits).to(torch.int64) << 32) | (_LOW - ids)


def _values(keys: torch.Tensor) -> torch.Tensor:
    return _ordered((keys >> 32).to(torch.int32)).view(torch.float32)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Float32 bits <-> int32 of the same order (its own inverse): flip the magnitude bits of negative numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def take_blocks(rows: torch.Tensor, blocks: torch.Tensor) -> Candidates:
    """Values and ids of the chosen blocks: [S, c] -> [S, c * BLOCK]; past the last id the value is -inf."""
    width = rows.shape[1]
    ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    if width % BLOCK == 0:
        return Candidates(rows.gather(1, ids), ids)
    values = rows.gather(1, ids.clamp(max=width - 1))
    return Candidates(values.masked_fill(ids >= width, float("-inf")), ids)
