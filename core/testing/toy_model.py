"""A model of no layers for tests of what runs models: its next id is a function of all ids before, read back through the
KV cache. A wrong block, slot, order or id in flight changes what it says."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.batch import ModelBatch, SamplerOutput, SamplingMetadata
from core.model.interface import (
    AttentionContext,
    AttentionSpec,
    ExecutorContext,
    ModelContext,
    QuantContext,
    StepResult,
)
from core.model.roofline import Roofline
from core.progress import no_progress
from core.testing.engines import fake_spec
from core.testing.fakes import VOCAB_SIZE
from core.testing.naive import DenseQuant, slots_of

BLOCK_SIZE = 16


def toy_next(ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token_id % 256 for token_id in ids)) % VOCAB_SIZE


def toy_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request gets: the slow twin of model, executor and batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(toy_next(ids))
    return ids[len(prompt) :]


ROOFLINE = Roofline(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


class ToyAttention:
    """One id per slot where a backend keeps keys and values. The toy model reads it by itself."""

    def __init__(self, context: AttentionContext):
        self._context = context

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks * self._context.block_size,)

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
        return None

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        raise AssertionError("the toy model has no attention")


@dataclass(slots=True)
class ToyModel:
    """`fault` may raise before a batch is run."""

    fault: Callable[[ModelBatch], None] | None = None
    batches: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (AttentionSpec(0, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0),)

    def forward(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        self.batches.append(batch.request_ids)
        if self.fault is not None:
            self.fault(batch)
        assert bool((batch.input_ids >= 0).all()), "an id in flight was not filled in"
        (cache,) = kv_caches
        cache[batch.slot_mapping] = batch.input_ids.to(cache.dtype)
        logits = torch.full((len(batch.logits_indices), VOCAB_SIZE), -1.0)
        for row, at in enumerate(batch.logits_indices.tolist()):
            owner = int(torch.searchsorted(batch.query_start_loc, at, right=True)) - 1
            slots = slots_of(batch, owner, int(batch.positions[at]) + 1, BLOCK_SIZE)
            logits[row, toy_next([int(value) for value in cache[slots].tolist()])] = 1.0
        return logits

    def roofline(self) -> Roofline:
        return ROOFLINE


@dataclass(slots=True)
class ArgmaxSampler:
    """Greedy, without parameters, drafts or errors. Notes what it was told to forget."""

    forgotten: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the logits of each step

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        self.shapes.append(tuple(logits.shape))
        best = logits.argmax(-1).tolist()
        rows = zip(metadata.sampled_rows, metadata.rows, strict=True)
        return SamplerOutput({row.request_id: (best[index],) for index, row in rows})

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids


@dataclass(slots=True)
class Toy:
    """Everything that an executor builds, and its context."""

    model: ToyModel = field(default_factory=ToyModel)
    sampler: ArgmaxSampler = field(default_factory=ArgmaxSampler)
    devices: list[str] = field(default_factory=list)  # for which a sampler was built

    def context(self) -> ExecutorContext:
        return ExecutorContext(
            spec=fake_spec(),
            build_model=self._build_model,
            build_attention=ToyAttention,
            build_quant=_build_quant,
            build_sampler=self._build_sampler,
            dtype="float32",
            device="cpu",
            block_size=BLOCK_SIZE,
            max_num_scheduled_tokens=256,
            max_num_running_reqs=16,
            progress=no_progress,
        )

    def _build_model(self, context: ModelContext) -> ToyModel:
        return self.model

    def _build_sampler(self, device: str) -> ArgmaxSampler:
        self.devices.append(device)
        return self.sampler


def _build_quant(context: QuantContext) -> DenseQuant:
    return DenseQuant(context)


def ids_of(result: StepResult) -> dict[str, tuple[int, ...]]:
    return dict(result.sampled.token_ids)
