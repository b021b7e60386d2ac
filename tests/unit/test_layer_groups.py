"""Which layers share a block table and a KV tensor, and what an attention backend is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from core.batch import ModelBatch
from core.cache.kv_cache import CacheSettings
from core.errors import PluginError
from core.isolation.faults import SpoiltKVError
from core.isolation.model import GuardedAttention, of_group
from core.kv_layout import largest_step, read_layout
from core.model.interface import AttentionContext, AttentionSpec, NoFaults
from core.model.layer_groups import LayerGroups
from core.testing.batches import Share, batch_of
from core.testing.naive import NaiveAttention


def gemma3(num_layers: int, window: int = 512, period: int = 6) -> list[AttentionSpec]:
    windows = [window if (layer + 1) % period else None for layer in range(num_layers)]
    return [AttentionSpec(layer, 4, 1, 256, 1.0, one) for layer, one in enumerate(windows)]


def shape(spec: AttentionSpec) -> tuple[int, ...]:
    return (1, 16, 2, spec.num_kv_heads, spec.head_dim)


@pytest.mark.parametrize(
    ("num_layers", "num_full", "num_groups"), [(18, 3, 6), (26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 10, 7)]
)
def test_gemma3_of_all_sizes(num_layers: int, num_full: int, num_groups: int) -> None:
    specs = gemma3(num_layers)
    groups = LayerGroups.of(specs, shape)
    assert groups.windows == (None, *[512] * (num_groups - 1)) and groups.num_tensors == num_full
    places = list(zip(groups.group_of, groups.tensor_of, strict=True))
    assert len(set(places)) == num_layers, "two layers of one group share a tensor"
    for spec, (group, _) in zip(specs, places, strict=True):
        assert groups.windows[group] == spec.sliding_window


def test_two_windows_are_two_groups() -> None:
    specs = [AttentionSpec(layer, 1, 1, 8, 1.0, window) for layer, window in enumerate((None, 8, 64, 8, 64, None))]
    groups = LayerGroups.of(specs, shape)
    assert groups.windows == (None, 8, 64) and groups.group_of == (0, 1, 2, 1, 2, 0)
    assert groups.tensor_of == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    "windows",
    [
        (None, None, None),  # nothing slides
        (8, 8, 8),  # all do
        (None, None, None, 8),  # a block of the sliding layer would be two thirds empty
        (None, *[8] * 30),  # too many tables
    ],
)
def test_one_group_alone_where_several_save_nothing(windows: Sequence[int | None]) -> None:
    specs = [AttentionSpec(layer, 1, 1, 8, 1.0, window) for layer, window in enumerate(windows)]
    assert LayerGroups.of(specs, shape) == LayerGroups.alone(len(windows))


def test_one_group_alone_for_layers_that_differ() -> None:
    other_heads = [AttentionSpec(0, 2, 1, 16, 1.0), AttentionSpec(1, 2, 2, 8, 1.0, 8)]
    assert LayerGroups.of(other_heads, shape) == LayerGroups.alone(2)
    assert LayerGroups.of(other_heads, lambda spec: (16, 16)) == LayerGroups.alone(2)
    other_shapes = [AttentionSpec(0, 2, 1, 16, 1.0), AttentionSpec(1, 2, 1, 16, 1.0, 8)]
    assert LayerGroups.of(other_shapes, lambda spec: (spec.layer + 1,)) == LayerGroups.alone(2)
    assert LayerGroups.of(other_shapes[::-1], shape) == LayerGroups.alone(2)


def grouped_batch() -> ModelBatch:
    """Two requests of 40 and 5 tokens, two groups beside the first."""
    shares = [Share("a", [1] * 40, 39, 1, [0, 1, 2]), Share("b", [2] * 5, 0, 5, [3])]
    tables = [[[-1, 4, 5], [6, -1, -1]], [[-1, -1, 7], [8, -1, -1]]]
    slots = [[5 * 16 + 7, *range(6 * 16, 6 * 16 + 5)], [7 * 16 + 7, *range(8 * 16, 8 * 16 + 5)]]
    return replace_groups(batch_of(shares, 16), tables, slots)


def replace_groups(batch: ModelBatch, tables: list[list[list[int]]], slots: list[list[int]]) -> ModelBatch:
    groups = torch.tensor(tables, dtype=torch.int32)
    return replace(batch, group_block_tables=groups, group_slot_mappings=torch.tensor(slots))


SPECS = tuple(AttentionSpec(layer, 2, 1, 8, 1.0, window) for layer, window in enumerate((20, 4, None)))
CONTEXT = AttentionContext(torch.device("cpu"), torch.float32, 16)


class Noted(NaiveAttention):
    """Which table each layer reads by."""

    def forward(self, spec: AttentionSpec, *args: object) -> torch.Tensor:  # type: ignore[override]
        self.seen = {**getattr(self, "seen", {}), spec.layer: args[-1].block_table.tolist()}  # type: ignore[attr-defined]
        return args[0]  # type: ignore[return-value]


def test_a_backend_prepares_each_group_with_its_own_table() -> None:
    backend = Noted(CONTEXT)
    attention = GuardedAttention(backend, NoFaults())
    attention.use(LayerGroups((None, 4, 20), (2, 1, 0), (0, 0, 0)))
    batch = grouped_batch()
    metadata = attention.prepare(batch, SPECS)
    assert backend.prepared == [(SPECS[2],), (SPECS[1],), (SPECS[0],)]
    for spec in SPECS:
        attention.forward(spec, *[torch.zeros(6, 2, 8)] * 3, torch.zeros(1), metadata)
    assert batch.group_block_tables is not None
    tables = batch.group_block_tables.tolist()
    assert backend.seen == {2: batch.block_table.tolist(), 1: tables[0], 0: tables[1]}


def test_a_model_may_prepare_some_layers_alone() -> None:
    attention = GuardedAttention(NaiveAttention(CONTEXT), NoFaults())
    attention.use(LayerGroups((None, 4, 20), (2, 1, 0), (0, 0, 0)))
    metadata = attention.prepare(grouped_batch(), SPECS[:2])
    assert metadata[0] is None and metadata[1].slot_mapping[0] == 5 * 16 + 7


def test_tensors_of_groups_are_read_only_too() -> None:
    class Writes(NaiveAttention):
        def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> ModelBatch:
            batch.slot_mapping[0] = 3
            return batch

    attention = GuardedAttention(Writes(CONTEXT), NoFaults())
    attention.use(LayerGroups((None, 4), (1, 1, 1), (0, 1, 2)))
    with pytest.raises(SpoiltKVError, match="changed the tensors of the batch"):
        attention.prepare(grouped_batch(), SPECS[:1])


def test_a_batch_without_tables_for_the_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a block table for one"):
        of_group(batch_of([Share("a", [1], 0, 1, [0])], 16), 1)


class Executor:
    def __init__(self, *windows: object):
        self.windows = windows


def test_layouts_of_executors() -> None:
    def layout(*windows: object, wanted: bool = True) -> tuple[int | None, ...]:
        return read_layout(Executor(*windows), "executor=x", wanted, CacheSettings(), lambda: 64).windows

    assert layout(None, 8, 8) == (None, 8, 8)
    assert layout(None, 8, 8, wanted=False) == (None,)
    for wrong in ((8, 8), (None, None), (None, 0), (None, "8")):
        with pytest.raises(PluginError, match="executor=x: its windows are"):
            layout(*wrong)


def test_a_prefill_that_says_its_largest_chunk_is_believed() -> None:
    class Says:
        def __init__(self, answer: object):
            self.answer = answer

        def largest_chunk(self, num_prompt_tokens: int) -> object:
            return self.answer

    assert largest_step(Says(64), 1000, 512) == 64
    for other in (Says(None), Says(4096), Says("x"), object()):
        assert largest_step(other, 1000, 512) == 512
