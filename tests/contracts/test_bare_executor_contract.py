"""An executor that inherits nothing and leaves `ExecutorContext.faults` and `incidents` alone keeps the contract."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from pydantic import BaseModel, ConfigDict

from core.batch import ModelBatch
from core.errors import ConfigError
from core.model.interface import AttentionContext, ExecutorContext, ModelContext, QuantContext, StepResult
from core.testing.executor import ExecutorContract

MAX_BYTES = 1 << 30


@dataclass
class Step:
    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Bare:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    device, dtype = "cpu", "float32"

    def __init__(self, settings: Settings, context: ExecutorContext):
        where = (torch.device("cpu"), torch.float32)
        self._attention = context.build_attention(AttentionContext(*where, context.block_size))
        quant = context.build_quant(QuantContext(*where))
        self._model = context.build_model(ModelContext(context.spec, *where, self._attention, quant, context.progress))
        self._sampler = context.build_sampler("cpu")
        self._newest: dict[str, int] = {}

    def free_memory(self) -> int | None:
        return None

    def kv_bytes_per_block(self) -> int:
        return sum(math.prod(self._attention.kv_shape(spec, 1)) for spec in self._model.attention_specs) * 4

    def allocate(self, num_blocks: int) -> None:
        if num_blocks * self.kv_bytes_per_block() > MAX_BYTES:
            raise ConfigError(f"{num_blocks} blocks do not fit")
        shapes = [self._attention.kv_shape(spec, num_blocks) for spec in self._model.attention_specs]
        self._caches = [torch.zeros(shape) for shape in shapes]

    def submit(self, batch: ModelBatch) -> Step:
        try:
            return Step(self._run(batch))
        except Exception as error:
            return Step(error)

    def _run(self, batch: ModelBatch) -> StepResult:
        ids = batch.input_ids.clone()
        for index, request_id in batch.token_sources.items():
            ids[index] = self._newest[request_id]
        logits = self._model.forward(replace(batch, input_ids=ids, token_sources={}), self._caches)
        sampled = self._sampler.sample(logits, batch.sampling)
        self._newest |= {key: token_ids[-1] for key, token_ids in sampled.token_ids.items()}
        return StepResult(sampled)

    def forget(self, request_ids) -> None:
        self._sampler.forget(request_ids)
        for request_id in request_ids:
            self._newest.pop(request_id, None)

    def close(self) -> None:
        pass


class TestBare(ExecutorContract):
    component = Bare
