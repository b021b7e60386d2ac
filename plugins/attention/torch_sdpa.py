"""Paged attention with torch's scaled-dot-product attention, on any device: the slow-but-sure backend.

A layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_dim]: one token's keys and values lie together, so one
gather of token rows fetches both. Padding of a gather repeats the request's own last token under a mask: no unused
slot or block is ever read. The query heads of one key/value head are folded into the query axis, so grouped-query
attention needs no expanded keys.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from core.batch import ModelBatch
from core.model.interface import AttentionContext, AttentionSpec
from plugins.attention.settings import TorchSdpaSettings

TILE = 256  # queries of one request that share a mask; bounds mask and score memory of long prefills
MERGED_TILE = 8  # tiles of at most this many queries are batched with equal tiles of other requests


@dataclass(frozen=True, slots=True)
class Variant:
    """What a layer's metadata depends on; layers that agree share it."""

    sliding_window: int | None
    softcap: bool  # computed explicitly, always under a mask
    group: int  # query heads per key/value head

    @classmethod
    def of(cls, spec: AttentionSpec) -> Variant:
        return cls(spec.sliding_window, spec.softcap is not None, spec.num_heads // spec.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive queries of one request and the keys they may see, as [first_key, end_key) of its positions."""

    request: int
    row: int  # of the first query in the T axis
    position: int  # of the first query in its sequence
    num_queries: int
    first_key: int

    @property
    def end_key(self) -> int:
        return self.position + self.num_queries


@dataclass(frozen=True, slots=True)
class Gathered:
    """n tiles of t queries and S keys each, the keys taken from the cache."""

    rows: Tensor | slice  # n * t rows of the T axis
    num_tiles: int
    key_slots: Tensor  # [n * S] int64
    mask: Tensor  # [n, 1, t * group or 1, S], 0 or -inf


@dataclass(frozen=True, slots=True)
class VariantPlan:
    gathered: tuple[Gathered, ...]
    fresh: tuple[slice, ...]  # rows of whole sequences: their keys are the batch's own, the mask is causal


class Scratch:
    """Where the layers of a step gather keys and values, one after the other.

    Fresh memory for each would be unmapped in between, and touching its pages again costs the CPU several times the
    copy. Other devices have an allocator that keeps memory.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def gather(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Rows `slots` of `cache`; valid until the next call."""
        if cache.device.type != "cpu":
            return cache.index_select(0, slots)
        shape = (slots.shape[0], *cache.shape[1:])
        size = math.prod(shape)
        if self._buffer is None or self._buffer.numel() < size or self._buffer.dtype != cache.dtype:
            self._buffer = torch.empty(size, dtype=cache.dtype)
        return torch.index_select(cache, 0, slots, out=self._buffer[:size].view(shape))


@dataclass(frozen=True, slots=True)
class Metadata:
    slots: Tensor  # [T] int64
    plans: dict[Variant, VariantPlan]
    scratch: Scratch


class TorchSdpa:
    """See `core.model.interface.AttentionBackend`.

    A row's padded length depends on its own length alone, so its result does not depend on its batch mates.
    """

    Settings = TorchSdpaSettings

    def __init__(self, settings: TorchSdpaSettings, context: AttentionContext):
        self._context = context

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self._context.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Metadata:
        planner = _Planner(batch, self._context)
        variants = dict.fromkeys(Variant.of(spec) for spec in specs)
        slots = batch.slot_mapping.to(self._context.device, non_blocking=True)
        return Metadata(slots, {variant: planner.plan(variant) for variant in variants}, Scratch())

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Metadata
    ) -> Tensor:
        cache = kv_cache.view(-1, 2, spec.num_kv_heads, spec.head_dim)
        cache[:, 0].index_copy_(0, metadata.slots, k)
        cache[:, 1].index_copy_(0, metadata.slots, v)
        plan = metadata.plans[Variant.of(spec)]
        if len(plan.gathered) == 1 and not plan.fresh:
            return _gathered(spec, q[plan.gathered[0].rows], cache, plan.gathered[0], metadata.scratch)
        if len(plan.fresh) == 1 and not plan.gathered:
            return _fresh(spec, q, k, v)
        out = torch.empty_like(q)
        for tiles in plan.gathered:
            out[tiles.rows] = _gathered(spec, q[tiles.rows], cache, tiles, metadata.scratch)
        for rows in plan.fresh:
            out[rows] = _fresh(spec, q[rows], k[rows], v[rows])
        return out


def _fresh(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A whole sequence from its first token on: [t, heads, head_dim] each."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _gathered(spec: AttentionSpec, q: Tensor, cache: Tensor, tiles: Gathered, scratch: Scratch) -> Tensor:
    """q [n * t, num_heads, head_dim], the same back."""
    n, kv_heads, head_dim = tiles.num_tiles, spec.num_kv_heads, spec.head_dim
    kv = scratch.gather(cache, tiles.key_slots).view(n, -1, 2, kv_heads, head_dim)
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    t, group = q.shape[0] // n, spec.num_heads // kv_heads
    folded = q.view(n, t, kv_heads, group, head_dim).transpose(1, 2).reshape(n, kv_heads, t * group, head_dim)
    if spec.softcap is None:
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=tiles.mask, scale=spec.scale)
    else:
        out = _softcapped(folded, k, v, tiles.mask, spec.scale, spec.softcap)
    return out.view(n, kv_heads, t, group, head_dim).transpose(1, 2).reshape(n * t, spec.num_heads, head_dim)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Scores in float32, capped before the mask (Gemma 2, arXiv:2408.00118, section 2)."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(scores.softmax(dim=-1), v.float()).to(q.dtype).contiguous()


class _Planner:
    """Cuts one batch into tiles and gathers their slots and masks, on the CPU; once per batch, not per layer."""

    def __init__(self, batch: ModelBatch, context: AttentionContext):
        self._context = context
        self._table = batch.block_table.cpu().to(torch.int64)
        self._rows = batch.query_start_loc.tolist()
        self._seq_lens = batch.seq_lens.tolist()

    def plan(self, variant: Variant) -> VariantPlan:
        groups: dict[tuple[int, ...], list[Tile]] = defaultdict(list)
        fresh: list[slice] = []
        for request, (row, end) in enumerate(pairwise(self._rows)):
            length, start = self._seq_lens[request], self._seq_lens[request] - (end - row)
            fits = variant.sliding_window is None or length <= variant.sliding_window
            if start == 0 and length > 1 and fits and not variant.softcap:
                fresh.append(slice(row, end))
                continue
            for tile in _cut(request, row, end - row, start, variant.sliding_window):
                alone = () if tile.num_queries <= MERGED_TILE else (tile.row,)
                groups[(tile.num_queries, padded_length(tile.end_key - tile.first_key), *alone)].append(tile)
        gathered = tuple(self._gather(tiles, key[1], variant) for key, tiles in groups.items())
        return VariantPlan(gathered, tuple(fresh))

    def _gather(self, tiles: Sequence[Tile], num_keys: int, variant: Variant) -> Gathered:
        first = torch.tensor([tile.first_key for tile in tiles])[:, None]
        last = torch.tensor([tile.end_key - 1 for tile in tiles])[:, None]
        keys = first + torch.arange(num_keys)  # [n, S] positions, those after `last` are padding
        read = torch.minimum(keys, last)
        size = self._context.block_size
        blocks = self._table[torch.tensor([tile.request for tile in tiles])].gather(1, read // size)
        slots = (blocks * size + read % size).flatten()
        device = self._context.device
        mask = self._mask(tiles, keys, variant).to(device, non_blocking=True)
        return Gathered(_rows(tiles, device), len(tiles), slots.to(device, non_blocking=True), mask)

    def _mask(self, tiles: Sequence[Tile], keys: Tensor, variant: Variant) -> Tensor:
        t = tiles[0].num_queries
        queries = torch.tensor([tile.position for tile in tiles])[:, None] + torch.arange(t)  # [n, t]
        hidden = keys[:, None, :] > queries[:, :, None]
        if variant.sliding_window is not None:
            hidden |= keys[:, None, :] <= queries[:, :, None] - variant.sliding_window
        mask = torch.zeros(hidden.shape, dtype=self._context.dtype).masked_fill_(hidden, float("-inf"))
        if t > 1:  # row order of folded queries: token first, then head
            mask = mask.repeat_interleave(variant.group, dim=1)
        return mask[:, None]


def _cut(request: int, row: int, num_queries: int, start: int, window: int | None) -> list[Tile]:
    tiles = []
    for offset in range(0, num_queries, TILE):
        position = start + offset
        first_key = 0 if window is None else max(0, position - window + 1)
        tiles.append(Tile(request, row + offset, position, min(TILE, num_queries - offset), first_key))
    return tiles


def _rows(tiles: Sequence[Tile], device: torch.device) -> Tensor | slice:
    rows = [tile.row + query for tile in tiles for query in range(tile.num_queries)]
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def padded_length(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, …: few distinct shapes, and at most half as much again as asked for."""
    size = 16
    while size < length:
        size *= 2
    return size * 3 // 4 if size > 16 and size * 3 // 4 >= length else size
