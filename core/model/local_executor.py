"""Model and sampler in the engine's own process, one step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.batch import ModelBatch, SamplerOutput
from core.cache.kv_cache import KVCopy
from core.errors import PluginError
from core.host_cpu import num_cores
from core.isolation.model import BatchSeal, blame_model, check_logits, check_sampled, checked_argmax, without_numbers
from core.model.interface import ExecutorContext, Model, StepResult
from core.model.model_settings import LocalExecutorSettings
from core.model.optional_model import ArgmaxModel
from core.model.roofline import Roofline
from core.model.runner import ModelRunner
from core.stages.sampler import ArgmaxSampler, Sampler

log = logging.getLogger("nonet.engine")


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A submission that was over when `submit` returned."""

    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A model and a sampler that agree on steps without logits."""

    model: ArgmaxModel
    sampler: ArgmaxSampler

    @classmethod
    def of(cls, model: Model, sampler: Sampler, device: torch.device) -> Shortcut | None:
        if device.type == "cpu" and isinstance(model, ArgmaxModel) and isinstance(sampler, ArgmaxSampler):
            return cls(model, sampler)
        return None


class LocalExecutor:
    """See `core.model.interface.Executor`. `num_threads` sets torch's thread count for the whole process."""

    Settings = LocalExecutorSettings

    def __init__(self, settings: LocalExecutorSettings, context: ExecutorContext):
        self._threads_before = torch.get_num_threads()
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
            if settings.num_threads > num_cores():
                text = "executor.num_threads=%d, and this process has %d cores: threads will wait for each other"
                log.warning(text, settings.num_threads, num_cores())
        self._vocab_size = context.spec.vocab_size
        self._runner = ModelRunner(context)
        if getattr(self._runner.model, "own_threads", False):
            torch.set_num_threads(1)  # its threads and torch's would wait for each other's cores, spinning
        self._sampler = context.build_sampler(self.device)
        self._begin_sampling = getattr(self._sampler, "begin", None)
        self._close_sampling = getattr(self._sampler, "close", None)
        self._argmax = Shortcut.of(self._runner.model, self._sampler, self._runner.device)
        self._incidents = context.incidents
        self._faults = context.faults

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

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._runner.layer_groups.windows

    def allocate(self, num_blocks: int) -> None:
        self._runner.allocate(num_blocks)

    def allocate_swap(self, num_blocks: int, checksums: bool = False) -> None:
        self._runner.allocate_swap(num_blocks, checksums)

    def swap(self, copies: Sequence[KVCopy]) -> None:
        self._runner.settle()
        self._runner.swap_memory.run(copies)

    def measure_swap(self) -> float:
        self._runner.settle()
        return self._runner.swap_memory.measure()

    def roofline(self) -> Roofline | None:
        return self._runner.roofline()

    def submit(self, batch: ModelBatch) -> FinishedStep:
        try:
            return FinishedStep(self._run(batch))
        except Exception as error:
            return FinishedStep(error)

    def _run(self, batch: ModelBatch) -> StepResult:
        started, blocked_s = time.perf_counter(), self._faults.blocked_s
        if self._begin_sampling is not None:
            self._begin_sampling(batch.sampling.rows)
        if self._argmax is not None and self._argmax.sampler.takes_argmax(batch.sampling):
            result = self._best(self._argmax.model, batch, started, blocked_s)
            if result is not None:
                return result
        seal = BatchSeal(batch)
        logits = self._runner.forward(batch)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # or the sampler's time would hold the forward pass
        seal.check("model")
        check_logits(logits, batch, self._vocab_size, self._runner.device)
        forwarded = time.perf_counter()
        sampled = self._sample(logits, batch)
        check_sampled(sampled)
        no_numbers = without_numbers(sampled, logits, batch, self._faults)
        sampled = blame_model(sampled, no_numbers, self._faults)
        self._runner.remember(sampled)
        forward_s, sample_s = forwarded - started, time.perf_counter() - forwarded
        incidents = self._incidents()
        self._faults.watch("model", forward_s - (self._faults.blocked_s - blocked_s))
        self._faults.watch("sampler", 0.0 if incidents else sample_s)
        return StepResult(sampled, forward_s, sample_s, (*incidents, *self._faults.take_incidents()), no_numbers)

    def _best(self, model: ArgmaxModel, batch: ModelBatch, started: float, blocked_s: float) -> StepResult | None:
        """A step without logits; None where a row has no number, and the whole way is to say whose fault that is."""
        seal = BatchSeal(batch)
        found = self._runner.forward_argmax(model, batch)
        seal.check("model")
        ids, peaks = checked_argmax(found, batch, self._vocab_size)
        if not all(map(math.isfinite, peaks)):
            return None
        sampling = batch.sampling
        tokens = {row.request_id: (ids[at],) for at, row in zip(sampling.sampled_rows, sampling.rows, strict=True)}
        sampled = SamplerOutput(tokens)
        self._runner.remember(sampled)
        forward_s = time.perf_counter() - started
        self._faults.watch("model", forward_s - (self._faults.blocked_s - blocked_s))
        return StepResult(sampled, forward_s, 0.0, (*self._incidents(), *self._faults.take_incidents()))

    @torch.inference_mode()
    def _sample(self, logits: torch.Tensor, batch: ModelBatch) -> SamplerOutput:
        """A logits processor's failure in the step of one request is that request's own: the step is not lost, and the
        engine hears of the incident now."""
        try:
            return self._sampler.sample(logits, batch.sampling)
        except PluginError as error:
            if batch.num_requests > 1:
                raise
            return SamplerOutput({}, errors={batch.request_ids[0]: str(error)})

    def forget(self, request_ids: Sequence[str]) -> None:
        self._runner.forget(request_ids)
        self._sampler.forget(request_ids)

    def close(self) -> None:
        self._runner.close()
        if self._close_sampling is not None:
            self._close_sampling()
        torch.set_num_threads(self._threads_before)
