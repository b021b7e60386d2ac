"""Attention backends that each break one promise of `core.model.interface`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TorchSdpa

provides = ("sliding_window", "softcap")


class ReadsPadding(TorchSdpa):
    """Reads whole blocks, and leaves it to a weight of zero that what was never written does not count."""

    caught_by = "test_equals_the_naive_twin"

    def forward(self, spec, q, k, v, kv_cache, metadata):
        out = super().forward(spec, q, k, v, kv_cache, metadata)
        size = self._context.block_size
        blocks = kv_cache.view(-1, size, 2, spec.num_kv_heads, spec.head_dim)[metadata.slots // size]
        return out + 0.0 * blocks.sum().to(out.dtype)


class PlansPerLayer(TorchSdpa):
    """Metadata is made anew for each layer."""

    caught_by = "test_forward_reads_no_values_on_the_host"

    def prepare(self, batch, specs):
        return batch, list(specs)

    def forward(self, spec, q, k, v, kv_cache, metadata):
        return super().forward(spec, q, k, v, kv_cache, super().prepare(*metadata))


class WrongSlot(TorchSdpa):
    """The keys of a step are written one token off."""

    caught_by = "test_equals_the_naive_twin"

    def prepare(self, batch, specs):
        return replace(super().prepare(batch, specs), slots=batch.slot_mapping.roll(1))


class WindowOffByOne(TorchSdpa):
    """A token sees itself and `sliding_window` positions before it."""

    caught_by = "test_equals_the_naive_twin"

    def _wider(self, spec):
        return replace(spec, sliding_window=None if spec.sliding_window is None else spec.sliding_window + 1)

    def prepare(self, batch, specs):
        return super().prepare(batch, [self._wider(spec) for spec in specs])

    def forward(self, spec, q, k, v, kv_cache, metadata):
        return super().forward(self._wider(spec), q, k, v, kv_cache, metadata)


class DependsOnBatch:
    """Scores of the whole batch in one softmax, those of other requests pushed down but not out."""

    caught_by = "test_a_request_does_not_depend_on_its_batch_mates"
    Settings = TorchSdpaSettings

    def __init__(self, settings, context):
        self._inner = TorchSdpa(settings, context)

    def kv_shape(self, spec, num_blocks):
        return self._inner.kv_shape(spec, num_blocks)

    def prepare(self, batch, specs):
        return self._inner.prepare(batch, specs), tuple(pairwise(batch.query_start_loc.tolist()))

    def forward(self, spec, q, k, v, kv_cache, metadata):
        plan, parts = metadata
        out = self._inner.forward(spec, q, k, v, kv_cache, plan)
        return out + 1e-2 * out.abs().mean() * torch.ones_like(out) * (len(parts) > 1)
