"""What a model, an attention backend and a sampler may not do in a step, looked at where they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from core.batch import ModelBatch, SamplerOutput
from core.errors import shown, told
from core.isolation.faults import SpoiltKVError, StageError
from core.model.interface import AttentionBackend, AttentionSpec, StepFaults
from core.model.layer_groups import LayerGroups
from core.model.optional_model import Argmax


class BatchSeal:
    """Tells whether somebody wrote into the tensors of a batch, by torch's count of in-place changes."""

    def __init__(self, batch: ModelBatch):
        tensors = (
            batch.input_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.slot_mapping,
            batch.logits_indices,
            batch.group_block_tables,
            batch.group_slot_mappings,
        )
        self._tensors = [tensor for tensor in tensors if tensor is not None]
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self, group: str) -> None:
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise SpoiltKVError(group, "it changed the tensors of the batch, which are only to be read")


class GuardedAttention:
    """An `AttentionBackend`. What `forward` raises names its backend by itself (`core.isolation.faults.Names.blame`).

    Where layers are in several groups (`use`), the backend prepares each of them, with the block table of that group.
    """

    def __init__(self, backend: AttentionBackend, faults: StepFaults):
        self._backend = backend
        self._faults = faults
        self._groups: LayerGroups | None = None  # None: one group alone
        self.kv_shape = backend.kv_shape

    def use(self, groups: LayerGroups) -> None:
        self._groups = groups if len(groups.windows) > 1 else None

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
        seal = BatchSeal(batch)
        metadata = self._prepared(batch, specs) if self._groups is None else self._prepared_by_group(batch, specs)
        seal.check("attention")
        return metadata

    def _prepared(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
        return self._faults.call("attention", None, self._backend.prepare, batch, specs)

    def _prepared_by_group(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> list[Any]:
        """Metadata of each group; None for one without layers among `specs`."""
        assert self._groups is not None
        members: list[list[AttentionSpec]] = [[] for _ in self._groups.windows]
        for spec in specs:
            members[self._groups.group_of[spec.layer]].append(spec)
        batches = [of_group(batch, group) for group in range(len(members))]
        return [self._prepared(*pair) if pair[1] else None for pair in zip(batches, members, strict=True)]

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        if self._groups is not None:
            metadata = metadata[self._groups.group_of[spec.layer]]
        out = self._backend.forward(spec, q, k, v, kv_cache, metadata)
        if out.shape != q.shape or out.dtype != q.dtype:
            got, wanted = f"{list(out.shape)} {out.dtype}", f"{list(q.shape)} {q.dtype}"
            raise StageError("attention", f"forward returned {got}, where {wanted} is wanted")
        return out


def of_group(batch: ModelBatch, group: int) -> ModelBatch:
    """The batch as it is for the layers of one group."""
    tables, slots = batch.group_block_tables, batch.group_slot_mappings
    if tables is None or slots is None:
        raise ValueError("the model's layers are in several groups, and the batch has a block table for one")
    if not group:
        return replace(batch, group_block_tables=None, group_slot_mappings=None)
    return replace(
        batch,
        block_table=tables[group - 1],
        slot_mapping=slots[group - 1],
        group_block_tables=None,
        group_slot_mappings=None,
    )


def check_logits(logits: object, batch: ModelBatch, vocab_size: int, device: torch.device) -> None:
    """Raises StageError where a model did not return [R, V] float32 on its device."""
    wanted = (batch.logits_indices.shape[0], vocab_size)
    if not isinstance(logits, torch.Tensor):
        raise StageError("model", f"forward returned {shown(logits)}, which is no tensor")
    if logits.shape != wanted or logits.dtype != torch.float32 or logits.device.type != device.type:
        got = f"{list(logits.shape)} {logits.dtype} on {logits.device}"
        raise StageError("model", f"forward returned logits {got}, where {list(wanted)} float32 on {device} is wanted")


def checked_argmax(found: object, batch: ModelBatch, vocab_size: int) -> tuple[list[int], list[float]]:
    """Ids and peaks of R rows. Raises StageError where a model did not return an id of its vocabulary and a number for each."""
    count = len(batch.logits_indices)
    if not isinstance(found, Argmax):
        raise StageError("model", f"forward_argmax returned {shown(found)}, which is no Argmax")
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (found.ids, found.peaks)]
    if shapes != [((count,), torch.int64), ((count,), torch.float32)]:
        raise StageError("model", f"forward_argmax returned {shapes}, where [{count}] int64 and float32 are wanted")
    ids = found.ids.tolist()  # so few numbers are looked at faster than an operation of torch begins
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise StageError("model", f"forward_argmax returned ids that are not below {vocab_size}")
    return ids, found.peaks.tolist()


def check_sampled(sampled: object) -> None:
    """Raises StageError for what is not even a SamplerOutput; the engine looks at each request's part."""
    if not isinstance(sampled, SamplerOutput) or not isinstance(sampled.token_ids, Mapping):
        raise StageError("sampler", f"sample returned {shown(sampled)}, which is no SamplerOutput")


def without_numbers(
    sampled: SamplerOutput, logits: torch.Tensor, batch: ModelBatch, faults: StepFaults
) -> tuple[str, ...]:
    """Ids of the requests that failed because the model's logits are no numbers. Costs nothing without an error."""
    return tuple(
        key
        for key, text in sampled.errors.items()
        if not faults.named_in(told(text)) and _has_no_numbers(logits, _rows_of(key, batch))
    )


def blame_model(sampled: SamplerOutput, keys: Sequence[str], faults: StepFaults) -> SamplerOutput:
    """The sampler's errors on these requests are the model's doing, or its attention's."""
    if not keys:
        return sampled
    beside = f"with {faults.who('attention')} and {faults.who('quant')}"
    reasons = {key: f"{told(sampled.errors[key])} ({beside})" for key in keys}
    for reason in reasons.values():
        faults.note("model", reason)
    errors = {**sampled.errors, **{key: f"{faults.who('model')}: {reason}" for key, reason in reasons.items()}}
    return SamplerOutput(sampled.token_ids, sampled.logprobs, sampled.prompt_logprobs, errors)


def _rows_of(key: str, batch: ModelBatch) -> list[int]:
    sampling = batch.sampling
    rows = [index for index, row in zip(sampling.sampled_rows, sampling.rows, strict=True) if row.request_id == key]
    return rows + [index for part in sampling.prompt_rows if part.request_id == key for index in part.rows]


def _has_no_numbers(logits: torch.Tensor, rows: Sequence[int]) -> bool:
    """NaN or +inf; -inf is a mask."""
    return bool(rows) and not bool((logits[list(rows)] < torch.inf).all())
