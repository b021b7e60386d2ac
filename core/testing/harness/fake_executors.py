"""Executors without a model, for tests of the engine and of plugins around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.batch import ModelBatch, SamplerOutput
from core.cache.kv_cache import KVCopy
from core.model.interface import StepResult
from core.model.roofline import Roofline
from core.testing.fakes import FakeModel

Fault = Callable[[ModelBatch], None]  # may raise
SwapFault = Callable[[KVCopy], None]  # likewise


@dataclass(slots=True)
class Done:
    """A `Submission` that has its result already."""

    sampled: SamplerOutput

    def result(self) -> StepResult:
        return StepResult(self.sampled)


@dataclass(slots=True)
class FakeExecutor:
    """`core.model.interface.Executor` over `FakeModel`; `fault` may raise before a batch is run, `swap_fault` before a copy."""

    block_size: int = 16
    fault: Fault | None = None
    forgotten: list[str] = field(default_factory=list)
    batches: list[tuple[str, ...]] = field(default_factory=list)
    closed: bool = False
    swap_fault: SwapFault | None = None
    copies: list[KVCopy] = field(default_factory=list)
    device: str = "cpu"
    dtype: str = "float32"
    windows: tuple[int | None, ...] = (None,)
    _model: FakeModel | None = None

    def free_memory(self) -> int | None:
        return 1 << 30

    def kv_bytes_per_block(self) -> int:
        return 8 * self.block_size

    def allocate(self, num_blocks: int) -> None:
        self._model = FakeModel(num_blocks, self.block_size, self.windows)

    def allocate_swap(self, num_blocks: int, checksums: bool = False) -> None:
        assert self._model is not None, "allocate comes first"
        self._model.allocate_swap(num_blocks)

    def swap(self, copies: Sequence[KVCopy]) -> None:
        assert self._model is not None, "allocate comes first"
        for copy in copies:
            self.copies.append(copy)
            if self.swap_fault is not None:
                self.swap_fault(copy)
            self._model.swap([copy])

    def roofline(self) -> Roofline | None:
        return None

    def measure_swap(self) -> float:
        return 1e-6

    def submit(self, batch: ModelBatch) -> Done:
        assert self._model is not None, "allocate comes first"
        self.batches.append(batch.request_ids)
        if self.fault is not None:
            self.fault(batch)
        return Done(self._model.run(batch))

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids

    def close(self) -> None:
        self.closed = True
