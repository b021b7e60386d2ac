"""What a model needs around it, slow and plain: attention one query at a time, and dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from core.batch import ModelBatch
from core.model.interface import AttentionContext, AttentionSpec, Linear, QuantContext
from core.testing.attention import naive_attention


@dataclass(slots=True)
class NaiveAttention:
    """An `AttentionBackend` over `naive_attention`. Counts what it was asked."""

    context: AttentionContext
    prepared: list[tuple[AttentionSpec, ...]] = field(default_factory=list)  # the specs of each `prepare`
    attended: list[int] = field(default_factory=list)  # the layer of each `forward`

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks * self.context.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> ModelBatch:
        self.prepared.append(tuple(specs))
        return batch

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: ModelBatch
    ) -> Tensor:
        self.attended.append(spec.layer)
        kv_cache[metadata.slot_mapping, 0] = k
        kv_cache[metadata.slot_mapping, 1] = v
        out = torch.empty_like(q)
        for index, (row, end) in enumerate(pairwise(metadata.query_start_loc.tolist())):
            length = int(metadata.seq_lens[index])
            slots = slots_of(metadata, index, length, self.context.block_size)
            keys, values = kv_cache[slots].unbind(1)
            out[row:end] = naive_attention(spec, q[row:end], keys, values, length - (end - row)).to(q.dtype)
        return out


def slots_of(batch: ModelBatch, index: int, length: int, block_size: int) -> Tensor:
    """Slots of positions [0, length) of the batch's request `index`, through its block table."""
    positions = torch.arange(length)
    blocks = batch.block_table[index].long()[positions // block_size]
    assert bool((blocks >= 0).all()), "a position has no block"
    return blocks * block_size + positions % block_size


@dataclass(slots=True)
class DenseQuant:
    """A `QuantMethod` that keeps weights as they are. Notes the names it was asked for."""

    context: QuantContext
    names: list[str] = field(default_factory=list)

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        self.names.append(name)
        device, dtype = self.context.device, self.context.dtype
        return partial(linear, weight=weight.to(device, dtype), bias=None if bias is None else bias.to(device, dtype))
