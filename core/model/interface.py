"""Contracts of the helpers of stages 5 to 7: model, attention, quant, executor. One Protocol each, about five methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from core.batch import ModelBatch, SamplerOutput
from core.isolation.faults import Faults
from core.outputs import PluginIncident

if TYPE_CHECKING:
    import torch

    from core.model.spec import ModelSpec
    from core.progress import Progress
    from core.stages.sampler import Sampler


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer asks of a backend. Sizes in elements."""

    layer: int  # index of its KV cache
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q·k
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 positions before it
    softcap: float | None = None  # softcap * tanh(score / softcap)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    device: torch.device
    dtype: torch.dtype  # of q, k, v and the KV cache
    block_size: int


class AttentionBackend(Protocol):
    """Config group `attention`: paged attention over a mixed batch. `forward` is graph-safe."""

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's KV cache; first axis is not assumed by anyone but this backend."""
        ...

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
        """Metadata for one batch, built once per batch and not per layer; handed back to each `forward`.

        query_start_loc, seq_lens and block_table [N…] are on the CPU, for planning; tensors [T] are on the device.
        """
        ...

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,  # [T, num_heads, head_dim], after RoPE
        k: torch.Tensor,  # [T, num_kv_heads, head_dim], after RoPE
        v: torch.Tensor,  # [T, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Write k and v at the batch's slots, then attend. Returns [T, num_heads, head_dim]."""
        ...


class Linear(Protocol):
    """x [T, in] -> [T, out]. Graph-safe."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class QuantContext:
    device: torch.device
    dtype: torch.dtype  # of activations


class QuantMethod(Protocol):
    """Config group `quant`: how a linear layer's weight is kept and applied."""

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """`name` is the module's Hugging Face name; `weight` [out, in] in the checkpoint's or the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class ModelContext:
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    quant: QuantMethod
    progress: Progress  # while weights load


class Model(Protocol):
    """Config group `model`: what runs. Weights are loaded by the constructor."""

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per attention layer, in layer order: sizes the KV pool."""
        ...

    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the batch, write its KV, return logits [R, V] float32 for `batch.logits_indices`.

        The batch is only read: changes are noticed where it is on the CPU, and fail the request that they come of.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """`sampler` is built where the model lives; a remote executor builds its own from the same settings."""

    spec: ModelSpec
    build_model: Callable[[ModelContext], Model]
    build_attention: Callable[[AttentionContext], AttentionBackend]
    build_quant: Callable[[QuantContext], QuantMethod]
    build_sampler: Callable[[str], Sampler]  # device name -> sampler
    dtype: str  # auto, float32, bfloat16, float16
    device: str  # auto, cpu, cuda
    block_size: int
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    progress: Progress
    incidents: Callable[[], tuple[PluginIncident, ...]] = tuple  # of the sampler's processors; go into StepResult
    faults: Faults = field(default_factory=Faults)  # of what runs with the model; its incidents go there too


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: SamplerOutput
    forward_s: float = 0.0
    sample_s: float = 0.0
    incidents: tuple[PluginIncident, ...] = ()  # of what runs with the model
    no_numbers: tuple[
        str, ...
    ] = ()  # ids of requests whose logits held NaN or +inf; they are among the sampler's errors


class Submission(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised; KV writes are idempotent, so a failed step may be run again."""
        ...


class Executor(Protocol):
    """Config group `executor`: where the model and stage 7 run (this process, another, several ranks, a captured graph)."""

    @property
    def device(self) -> str:
        """Where the model runs, resolved: cpu, cuda, cuda:1 …"""
        ...

    @property
    def dtype(self) -> str:
        """Of weights and KV, resolved: float32, bfloat16 or float16."""
        ...

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated where the KV pool will lie (several ranks: the least); None if unknown."""
        ...

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make the KV pool. Raises ConfigError with the numbers when it does not fit."""
        ...

    def submit(self, batch: ModelBatch) -> Submission:
        """Start the forward pass and stage 7 for one batch."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests ended: drop per-request state of the sampler."""
        ...

    def close(self) -> None: ...
