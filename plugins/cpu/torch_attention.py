"""The slow twin of `native/attention.h`: the same blocks, through torch. It runs where nothing compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from core.model.interface import AttentionSpec
from plugins.cpu.records import SUB

HEAD_BYTES = 2 * SUB * 4  # scales of the keys and of the values of a block of int8
LEAST = 1e-30  # largest number of a head that is not taken as zero


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What the tokens of one request see."""

    rows: slice  # of T
    slots: Tensor  # int64 [keys]
    hidden: Tensor  # bool [rows, keys]


def plan(pages: Sequence[Tensor], block_size: int, window: int | None) -> list[Share]:
    """`pages`: positions [T], query_start_loc [N + 1], block_table [N, B]."""
    positions, query_start_loc, table = pages
    shares = []
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        if end == start:
            continue
        seen = positions[start:end]
        first = 0 if window is None else max(0, int(seen[0]) - window + 1)
        keys = torch.arange(first, int(seen[-1]) + 1)
        slots = table[request].long()[keys // block_size] * block_size + keys % block_size
        hidden = keys > seen[:, None]
        if window is not None:
            hidden |= keys <= seen[:, None] - window
        shares.append(Share(slice(start, end), slots, hidden))
    return shares


def attend(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, blocks: KVBlocks, slots: Tensor, shares: Sequence[Share]
) -> Tensor:
    """Write k and v at their slots, then attend, request by request. Shapes as in `AttentionBackend.forward`."""
    blocks.write(slots, k, v)
    out = torch.empty(q.shape, dtype=torch.float32)
    for share in shares:
        out[share.rows] = _attended(spec, q[share.rows], *blocks.read(share.slots), share.hidden)
    return out.to(q.dtype)


def _attended(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """q [t, num_heads, head_dim]; k and v float32 [keys, num_kv_heads, head_dim]."""
    ratio = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = torch.einsum("thd,khd->htk", q.float(), k) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htk,khd->thd", weights, v)


class KVBlocks(Protocol):
    """One layer's cache, token by token."""

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [n, num_kv_heads, head_dim]."""

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, num_kv_heads, head_dim] each."""
        ...


class Blocks:
    """One layer's cache, token by token. `pack` numbers of a key lie side by side in four bytes."""

    def __init__(self, kv_cache: Tensor, spec: AttentionSpec):
        heads, dim = spec.num_kv_heads, spec.head_dim
        pack = 4 // kv_cache.element_size()
        parts = kv_cache.view(-1, heads, 2, SUB * dim)
        self._keys = parts[:, :, 0].view(-1, heads, dim // pack, SUB, pack)
        self._values = parts[:, :, 1].view(-1, heads, SUB // pack, dim, pack)
        self._pack = pack

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        sub, lane = slots // SUB, slots % SUB
        self._keys[sub, :, :, lane] = k.view(*k.shape[:2], -1, self._pack)
        self._values[sub, :, lane // self._pack, :, lane % self._pack] = v

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, num_kv_heads, head_dim] each."""
        sub, lane = slots // SUB, slots % SUB
        keys = self._keys[sub, :, :, lane].flatten(2)
        return keys.float(), self._values[sub, :, lane // self._pack, :, lane % self._pack].float()


class Int8Blocks:
    """The same of int8: scales of 16 keys and 16 values, the keys, four dimensions side by side, and the values."""

    def __init__(self, kv_cache: Tensor, spec: AttentionSpec):
        heads, dim = spec.num_kv_heads, spec.head_dim
        pieces = kv_cache.view(torch.uint8).view(-1, heads, HEAD_BYTES + 2 * SUB * dim)
        keys, values = pieces[..., HEAD_BYTES : HEAD_BYTES + SUB * dim], pieces[..., HEAD_BYTES + SUB * dim :]
        self._scales = pieces[..., :HEAD_BYTES].view(torch.float32).view(-1, heads, 2, SUB)
        self._keys = keys.view(-1, heads, dim // 4, SUB, 4)  # number + 128
        self._values = values.view(torch.int8).view(-1, heads, SUB, dim)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        sub, lane = slots // SUB, slots % SUB
        keys, self._scales[sub, :, 0, lane] = rounded_heads(k)
        self._keys[sub, :, :, lane] = (keys.short() + 128).to(torch.uint8).view(*k.shape[:2], -1, 4)
        self._values[sub, :, lane], self._scales[sub, :, 1, lane] = rounded_heads(v)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n, num_kv_heads, head_dim] each."""
        sub, lane = slots // SUB, slots % SUB
        keys = self._keys[sub, :, :, lane].flatten(2).float() - 128
        scales = self._scales[sub, :, :, lane][..., None]
        return keys * scales[:, :, 0], self._values[sub, :, lane].float() * scales[:, :, 1]


def rounded_heads(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [n, heads, dim], and the scale of each head: float32 [n, heads], NaN where a number is infinite or none."""
    numbers = numbers.float()
    most = numbers.abs().amax(-1)
    finite = most.isfinite()
    inverse = torch.where(finite & (most > LEAST), most.new_full((), 127.0) / most, 0.0)
    scaled = torch.where(finite[..., None], numbers, 0.0) * inverse[..., None]
    return scaled.round().to(torch.int8), torch.where(finite, most / 127.0, torch.nan)
