"""`core.testing.harness.faulty` for what runs with the model: sampler, logits processors, model, attention, quant, executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.batch import ModelBatch, SampledRow, SamplerOutput, SamplingMetadata
from core.model.interface import Linear, StepResult
from core.testing.harness.faulty import AFTER_TOKENS, NAN, Changes, Fault, Wrapper, is_victim


def changes_of_row(row: SampledRow) -> Changes:
    return {
        "an output id more": lambda: row.output_token_ids.append(1),
        "another list of output ids": lambda: setattr(row, "output_token_ids", []),
        "another seed": lambda: setattr(row, "seed", 1),
    }


def changes_of_batch(batch: ModelBatch, row: SampledRow) -> Changes:
    """`batch` is one that the victim's `row` belongs to."""
    return {**changes_of_row(row), "slot_mapping": batch.slot_mapping.zero_, "positions": batch.positions.zero_}


def due_rows(metadata: SamplingMetadata) -> list[int]:
    return [
        index for index, row in enumerate(metadata.rows) if is_victim(row.request_id) and row.position >= AFTER_TOKENS
    ]


def tokens_of(row: SampledRow, batch: ModelBatch) -> slice:
    """Of the T axis: the row's request."""
    index = batch.request_ids.index(row.request_id)
    return slice(*batch.query_start_loc.tolist()[index : index + 2])


@dataclass(slots=True)
class FaultySampler(Wrapper):
    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> Any:
        due = due_rows(metadata)
        if not due:
            return self.inner.sample(logits, metadata)
        row = metadata.rows[due[0]]
        kind = self.fault.strike(changes_of_row(row))
        sampled: SamplerOutput = self.inner.sample(logits, metadata)
        wrong: Any = {"wrong shape": [["one"]], "NaN": (NAN,)}.get(kind)
        if wrong is None:
            return sampled
        return replace(sampled, token_ids={**sampled.token_ids, row.request_id: wrong})


@dataclass(slots=True)
class FaultyLogitsProcessor:
    """Concerned with every request, and harmless to all but the victim."""

    inner: Any
    fault: Fault

    def state(self, row: SampledRow, params: Any) -> object:
        return row.request_id

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[Any]) -> None:
        for index, row in enumerate(rows):
            if is_victim(row.request_id) and row.position >= AFTER_TOKENS:
                kind = self.fault.strike(changes_of_row(row))
                if kind == "wrong shape":
                    logits.resize_(logits.shape[0], logits.shape[1] - 1)
                if kind == "NaN":
                    logits[index] = NAN


@dataclass(slots=True)
class FaultyModel(Wrapper):
    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        due = due_rows(batch.sampling)
        if not due:
            return self.inner.forward(batch, kv_caches)  # type: ignore[no-any-return]
        kind = self.fault.strike(changes_of_batch(batch, batch.sampling.rows[due[0]]))
        logits: torch.Tensor = self.inner.forward(batch, kv_caches)
        if kind == "wrong shape":
            return logits[:, :-1]
        if kind == "NaN":
            logits = logits.clone()
            logits[batch.sampling.sampled_rows[due[0]]] = NAN
        return logits


@dataclass(slots=True)
class FaultyAttention(Wrapper):
    _tokens: slice | None = None  # of the victim, in the batch that was prepared

    def prepare(self, batch: ModelBatch, specs: Any) -> Any:
        self._tokens = None
        due = due_rows(batch.sampling)
        if due:
            row = batch.sampling.rows[due[0]]
            self._tokens = tokens_of(row, batch)
            self.fault.strike(changes_of_batch(batch, row))
        return self.inner.prepare(batch, specs)

    def forward(self, spec: Any, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner.forward(spec, q, k, v, kv_cache, metadata)
        if self._tokens is not None and self.fault.kind == "wrong shape":
            return out[:, :-1]
        if self._tokens is not None and self.fault.kind == "NaN":
            out[self._tokens] = NAN
        return out


@dataclass(slots=True)
class MarkingModel(Wrapper):
    """Fails nowhere: it says which tokens are the victim's, for a quant method, which is told of no request."""

    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        due = due_rows(batch.sampling)
        self.fault.victim_rows = tokens_of(batch.sampling.rows[due[0]], batch) if due else None
        try:
            return self.inner.forward(batch, kv_caches)  # type: ignore[no-any-return]
        finally:
            self.fault.victim_rows = None


@dataclass(slots=True)
class FaultyQuant:
    """Wrong in one layer's linear, the first that it is asked for. It is shown nothing but its own numbers to change."""

    inner: Any
    fault: Fault
    _is_made: bool = False

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        made: Linear = self.inner.linear(name, weight, bias)
        if self._is_made:
            return made
        self._is_made = True
        return FaultyLinear(made, self.fault)


@dataclass(slots=True)
class FaultyLinear:
    inner: Any
    fault: Fault

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.fault.victim_rows
        if rows is None:
            return self.inner(x)  # type: ignore[no-any-return]
        kind = self.fault.strike({})
        out: torch.Tensor = self.inner(x)
        if kind == "wrong shape":
            return out[:, :-1]
        if kind == "NaN":
            out[rows] = NAN
        return out


@dataclass(slots=True)
class FaultyExecutor(Wrapper):
    def submit(self, batch: ModelBatch) -> Any:
        due = due_rows(batch.sampling)
        if not due:
            return self.inner.submit(batch)
        row: SampledRow = batch.sampling.rows[due[0]]
        kind = self.fault.strike(changes_of_row(row))
        done = self.inner.submit(batch)
        return Changed(done, row.request_id, kind) if kind in ("wrong shape", "NaN") else done


@dataclass(frozen=True, slots=True)
class Changed:
    """A submission whose result is spoilt for one request."""

    inner: Any
    request_id: str
    kind: str

    def result(self) -> Any:
        result: StepResult = self.inner.result()
        if self.kind == "wrong shape":
            return (result.sampled, 0.0)
        token_ids: Any = {**result.sampled.token_ids, self.request_id: (NAN,)}
        return replace(result, sampled=replace(result.sampled, token_ids=token_ids))
