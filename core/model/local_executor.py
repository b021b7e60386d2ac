"""Model and sampler in the engine's own process, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.batch import ModelBatch
from core.model.interface import ExecutorContext, StepResult
from core.model.model_settings import LocalExecutorSettings
from core.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A submission that was over when `submit` returned."""

    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LocalExecutor:
    """See `core.model.interface.Executor`. `num_threads` sets torch's thread count for the whole process."""

    Settings = LocalExecutorSettings

    def __init__(self, settings: LocalExecutorSettings, context: ExecutorContext):
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._runner = ModelRunner(context)
        self._sampler = context.build_sampler(self.device)

    @property
    def device(self) -> str:
        return str(self._runner.device)

    @property
    def dtype(self) -> str:
        return str(self._runner.dtype).removeprefix("torch.")

    def free_memory(self) -> int | None:
        return self._runner.free_memory()

    def kv_bytes_per_block(self) -> int:
        return self._runner.kv_bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        self._runner.allocate(num_blocks)

    def submit(self, batch: ModelBatch) -> FinishedStep:
        try:
            return FinishedStep(self._run(batch))
        except Exception as error:
            return FinishedStep(error)

    def _run(self, batch: ModelBatch) -> StepResult:
        started = time.perf_counter()
        logits = self._runner.forward(batch)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or the sampler's time would hold the forward pass
        forwarded = time.perf_counter()
        with torch.inference_mode():
            sampled = self._sampler.sample(logits, batch.sampling)
        self._runner.remember(sampled)
        return StepResult(sampled, forward_s=forwarded - started, sample_s=time.perf_counter() - forwarded)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._runner.forget(request_ids)
        self._sampler.forget(request_ids)

    def close(self) -> None:
        self._runner.close()
