"""Contracts of the parts that stages 5 to 7 use: model, attention, quant, executor. One Protocol each, about five methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from core.batch import ModelBatch, SamplerOutput
from core.model.step_faults import NoFaults as NoFaults
from core.model.step_faults import StepFaults as StepFaults
from core.outputs import PluginIncident

if TYPE_CHECKING:
    import torch

    from core.cache.kv_cache import KVCopy
    from core.model.roofline import Roofline
    from core.model.spec import ModelSpec
    from core.model.weights import BlockWeight
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
    """Config group `attention`: paged attention over a mixed batch. `forward` is graph-safe.

    Example::

        from collections.abc import Sequence
        from itertools import pairwise
        from typing import Any

        import torch
        import torch.nn.functional as F
        from core.batch import ModelBatch
        from core.model.interface import AttentionContext, AttentionSpec
        from pydantic import BaseModel, ConfigDict
        from torch import Tensor


        class OneByOne:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")

            def __init__(self, settings: Settings, context: AttentionContext):
                self._size, self._device = context.block_size, context.device

            def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
                return (num_blocks * self._size, 2, spec.num_kv_heads, spec.head_dim)

            def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
                shares = []  # of each request: its rows in T, the slots of all its positions, what each row may see
                for index, (start, end) in enumerate(pairwise(batch.query_start_loc.tolist())):
                    positions = torch.arange(int(batch.seq_lens[index]))
                    blocks = batch.block_table[index].long()[positions // self._size]
                    slots = blocks * self._size + positions % self._size
                    seen = positions <= batch.positions[start:end, None].cpu()
                    shares.append((slice(start, end), slots.to(self._device), seen.to(self._device)))
                return batch.slot_mapping.to(self._device), shares

            def forward(
                self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any
            ) -> Tensor:
                written, shares = metadata
                kv_cache[written] = torch.stack((k, v), 1)
                out = torch.empty_like(q)
                for rows, slots, seen in shares:
                    parts = [x.transpose(0, 1)[None] for x in (q[rows], *kv_cache[slots].unbind(1))]
                    attended = F.scaled_dot_product_attention(*parts, seen, scale=spec.scale, enable_gqa=True)
                    out[rows] = attended[0].transpose(0, 1)  # of [1, num_heads, rows, head_dim]
                return out
    """

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's KV cache. Its first axis is n times as long for n blocks, block after block, where the backend
        provides `blocks_first`; else nobody but the backend assumes anything of it.
        """
        ...

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Any:
        """Metadata for one batch, built once per batch and not per layer; handed back to each `forward`.

        query_start_loc, seq_lens and block_table [N…] are on the CPU, for planning; tensors [T] are on the device.

        A backend that provides `window_groups` is asked once per group of layers, with the specs and the table of that group.
        Entries of blocks that lie before all windows of its queries are -1 then, and must not be read, not even under a mask;
        and layers of different groups may be given the same KV cache, in blocks that are not the other's.
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
    """Config group `quant`: how a linear layer's weight is kept and applied.

    Example::

        import torch
        import torch.nn.functional as F
        from core.model.interface import Linear, QuantContext
        from pydantic import BaseModel, ConfigDict


        class Int8:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")

            def __init__(self, settings: Settings, context: QuantContext):
                self._device, self._dtype = context.device, context.dtype

            def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
                full = weight.to(self._device, torch.float32)
                scale = full.abs().amax(1).clamp_min(1e-8) / 127  # [out]
                rounded = (full / scale[:, None]).round().to(torch.int8)
                scale, bias = scale.to(self._dtype), None if bias is None else bias.to(self._device, self._dtype)

                def apply(x: torch.Tensor) -> torch.Tensor:
                    product = F.linear(x, rounded.to(x.dtype)) * scale
                    return product if bias is None else product + bias

                return apply
    """

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """`name` is the module's Hugging Face name; `weight` [out, in] in the checkpoint's or the model's dtype."""
        ...


@runtime_checkable
class BlockQuantMethod(QuantMethod, Protocol):
    """A quant method that may take weights as a GGUF file has them. Optional (API 1.4): one without these methods gets floats."""

    def takes_blocks(self, name: str, block_formats: Sequence[str]) -> bool:
        """Whether `block_linear` is to be called with matrices in these formats (Q4_0, Q4_K, …), and not `linear` with floats."""
        ...

    def block_linear(self, name: str, blocks: Sequence[BlockWeight], bias: torch.Tensor | None) -> Linear:
        """`blocks`: matrices whose rows follow each other, with the same number of columns."""
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
    """Config group `model`: what runs. Weights are loaded by the constructor.

    Optional (API 1.4): `own_threads = True` says that it computes with threads of its own, as many as `torch.get_num_threads()`
    says when it is made; torch is left with one.

    Example::

        from collections.abc import Sequence

        import torch
        from core.batch import ModelBatch
        from core.model.decoder import NativeModel
        from core.model.interface import ModelContext
        from core.model.model_settings import NativeSettings
        from pydantic import Field


        class Scaled(NativeModel):  # its weights and `attention_specs`
            class Settings(NativeSettings):
                logit_scale: float = Field(default=1.0, gt=0)

            def __init__(self, settings: Settings, context: ModelContext):
                super().__init__(settings, context)
                self._scale = settings.logit_scale

            def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
                return super().forward(batch, kv_caches) * self._scale
    """

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
    faults: StepFaults = field(default_factory=NoFaults)  # may be left alone; its incidents go into StepResult, too
    window_groups: bool = False  # whether layers may be in groups (`Executor.windows`): all components agree to it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought. All but `sampled` may be left out.

    `incidents`: what components did wrong since the last result, from `ExecutorContext.incidents` (the sampler's logits
    processors) and `ExecutorContext.faults`. Operators are told; no request fails by it.

    `no_numbers`: ids among the errors of `sampled` whose logits were no numbers (NaN, +inf) when the model returned them. Where
    such a request reads blocks that another one wrote, the KV in them may be wrong: the engine computes all requests again.
    """

    sampled: SamplerOutput
    forward_s: float = 0.0  # seconds
    sample_s: float = 0.0  # seconds
    incidents: tuple[PluginIncident, ...] = ()
    no_numbers: tuple[str, ...] = ()


class Submission(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised; KV writes are idempotent, so a failed step may be run again."""
        ...


class Executor(Protocol):
    """Config group `executor`: where the model and stage 7 run (this process, another, several ranks, a captured graph).

    Example::

        import logging

        from core.batch import ModelBatch
        from core.model.interface import ExecutorContext, Submission
        from core.model.local_executor import LocalExecutor
        from core.model.model_settings import LocalExecutorSettings
        from pydantic import Field

        log = logging.getLogger("acme")


        class Logged(LocalExecutor):  # in the engine's own process, with its pool and its sampler
            class Settings(LocalExecutorSettings):
                num_tokens: int = Field(default=1024, ge=1, description="of a step that is logged")

            def __init__(self, settings: Settings, context: ExecutorContext):
                super().__init__(settings, context)
                self._limit = settings.num_tokens

            def submit(self, batch: ModelBatch) -> Submission:
                if batch.num_tokens >= self._limit:
                    log.info("step %d: %d tokens of %d requests", batch.step, batch.num_tokens, batch.num_requests)
                return super().submit(batch)
    """

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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group of layers that has block tables of its own: tokens that a token sees; None: all before it, as in the
        first group. Optional (API 1.2), with the word `window_groups`; several only where `ExecutorContext.window_groups`.

        The layers of several groups share KV tensors (`core.model.layer_groups`), and a block is one of one group.
        """
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

    def roofline(self) -> Roofline | None:
        """The model's, where it has one. Optional (API 1.4)."""
        ...

    # Host memory for KV: optional (API 1.2), all or none of it, with the word `swap`. Called after `allocate`.

    def allocate_swap(self, num_blocks: int, checksums: bool = False) -> None:
        """Make host memory for `num_blocks` KV blocks. Raises ConfigError with the numbers when it does not fit.

        `checksums`: `swap` compares each block that comes back with what went out.
        """
        ...

    def swap(self, copies: Sequence[KVCopy]) -> None:
        """Copy blocks over all layers, in this order: after the steps submitted before, and before those that come after. May
        return while copies are under way.

        Whatever it raises, a checksum that differs included, has the engine compute all requests again.
        """
        ...

    def measure_swap(self) -> float:
        """Seconds that one block takes one way, measured now on blocks that nobody uses yet."""
        ...
