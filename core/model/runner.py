"""Runs a model on one device: resolves device and dtype, owns the KV tensors, completes batches, calls forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from core.batch import ModelBatch, SamplerOutput
from core.errors import ConfigError
from core.isolation.model import GuardedAttention
from core.memory import free_host_memory
from core.model.interface import AttentionContext, AttentionSpec, ExecutorContext, Model, ModelContext, QuantContext
from core.model.layer_groups import LayerGroups
from core.model.optional_model import AheadModel, Argmax, ArgmaxModel, RooflineModel
from core.model.roofline import Roofline
from core.model.swap_memory import SwapMemory, swap_does_not_fit

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # feature names of x86 and Arm


class ModelRunner:
    """Everything of a step up to the logits. Not thread-safe; used from the engine loop."""

    def __init__(self, context: ExecutorContext):
        self.device = resolve_device(context.device)
        self.dtype = resolve_dtype(context.dtype, self.device)
        attention = context.build_attention(AttentionContext(self.device, self.dtype, context.block_size))
        self.attention = GuardedAttention(attention, context.faults)
        quant = context.build_quant(QuantContext(self.device, self.dtype))
        with torch.inference_mode():
            self.model: Model = context.build_model(
                ModelContext(context.spec, self.device, self.dtype, self.attention, quant, context.progress)
            )
        self._specs: tuple[AttentionSpec, ...] = self.model.attention_specs
        self.layer_groups = self._grouped() if context.window_groups else LayerGroups.alone(len(self._specs))
        self.attention.use(self.layer_groups)
        self._kv_tensors: Sequence[Tensor] = ()
        self._kv_caches: Sequence[Tensor] = ()  # of each layer: one of the tensors
        self._num_blocks = 0
        self._swap_memory: SwapMemory | None = None
        self._last_sampled: dict[str, int] = {}

    def _grouped(self) -> LayerGroups:
        return LayerGroups.of(self._specs, lambda spec: self.attention.kv_shape(spec, 1))

    @property
    def _tensor_specs(self) -> Sequence[AttentionSpec]:
        """A layer that uses it, for each tensor of the pool: those of the first group use them all."""
        groups = self.layer_groups
        return [spec for spec, group in zip(self._specs, groups.group_of, strict=True) if not group]

    def kv_bytes_per_block(self) -> int:
        elements = sum(math.prod(self.attention.kv_shape(spec, 1)) for spec in self._tensor_specs)
        return elements * self.dtype.itemsize

    def free_memory(self) -> int | None:
        """Bytes on the device that can still be allocated; None where the system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return free_host_memory()

    def allocate(self, num_blocks: int) -> None:
        """Make the KV tensors. Raises ConfigError with the sizes when memory lacks."""
        self.settle()
        self._kv_tensors = self._kv_caches = ()
        self._num_blocks, self._swap_memory = num_blocks, None
        needed, free = num_blocks * self.kv_bytes_per_block(), self.free_memory()
        if free is not None and needed > free:
            raise _does_not_fit(num_blocks, needed, free)
        try:
            with torch.inference_mode():
                self._kv_tensors = [self._kv_tensor(spec, num_blocks) for spec in self._tensor_specs]
        except (RuntimeError, MemoryError) as error:
            raise _does_not_fit(num_blocks, needed, free) from error
        self._kv_caches = [self._kv_tensors[tensor] for tensor in self.layer_groups.tensor_of]

    def _kv_tensor(self, spec: AttentionSpec, num_blocks: int) -> Tensor:
        shape = self.attention.kv_shape(spec, num_blocks)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy's zeros are pages that the system clears at first use: a pool costs what is used of it, and no time now.
        zeros = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(self.dtype).view(shape)

    def allocate_swap(self, num_blocks: int, checksums: bool = False) -> None:
        """Make host memory for KV. Raises ConfigError with the sizes when memory lacks."""
        needed, free = num_blocks * self.kv_bytes_per_block(), free_host_memory()
        if free is not None and self.device.type == "cpu":
            free = max(free - self._num_blocks * self.kv_bytes_per_block(), 0)  # the pool is there, and not touched yet
        if free is not None and needed > free:
            raise swap_does_not_fit(num_blocks, needed, free)
        self._swap_memory = SwapMemory(self._kv_tensors, self._num_blocks, num_blocks, checksums)

    @property
    def swap_memory(self) -> SwapMemory:
        """Raises RuntimeError before `allocate_swap`."""
        if self._swap_memory is None:
            raise RuntimeError("there is no host memory for KV: allocate_swap comes first")
        return self._swap_memory

    @torch.inference_mode()
    def forward(self, batch: ModelBatch) -> Tensor:
        """Logits float32 [R, V] on the runner's device."""
        return self.model.forward(self._completed(batch), self._kv_caches)

    @torch.inference_mode()
    def forward_argmax(self, model: ArgmaxModel, batch: ModelBatch) -> Argmax:
        return model.forward_argmax(self._completed(batch), self._kv_caches)

    def _completed(self, batch: ModelBatch) -> ModelBatch:
        """Ids in flight filled in, tensors over the T and R axes on the device.

        Those over the N axis (query_start_loc, seq_lens, block tables) stay on the CPU: attention backends plan with
        them in `prepare` and copy what their kernels need.
        """
        input_ids = self._with_ids_in_flight(batch) if batch.token_sources else batch.input_ids
        if self.device.type == "cpu":
            return batch if input_ids is batch.input_ids else replace(batch, input_ids=input_ids)
        slots = batch.group_slot_mappings
        return replace(
            batch,
            input_ids=input_ids.to(self.device, non_blocking=True),
            positions=batch.positions.to(self.device, non_blocking=True),
            slot_mapping=batch.slot_mapping.to(self.device, non_blocking=True),
            group_slot_mappings=None if slots is None else slots.to(self.device, non_blocking=True),
            logits_indices=batch.logits_indices.to(self.device, non_blocking=True),
        )

    def _with_ids_in_flight(self, batch: ModelBatch) -> Tensor:
        missing = set(batch.token_sources.values()) - self._last_sampled.keys()
        if missing:
            raise RuntimeError(f"step {batch.step}: no sampled token yet for requests {sorted(missing)}")
        input_ids = batch.input_ids.clone()
        for index, request_id in batch.token_sources.items():
            input_ids[index] = self._last_sampled[request_id]
        return input_ids

    def remember(self, sampled: SamplerOutput) -> None:
        """Keep each request's last id for a step that was planned before it was known. The engine refuses what is none."""
        for request_id, token_ids in sampled.token_ids.items():
            if type(token_ids) is tuple and token_ids and type(token_ids[-1]) is int:
                self._last_sampled[request_id] = token_ids[-1]
        # A request whose sampling failed may already be part of the next step; its row there is computed and discarded.
        for request_id in sampled.errors:
            self._last_sampled[request_id] = 0

    def roofline(self) -> Roofline | None:
        """Of a model that tells one."""
        return self.model.roofline() if isinstance(self.model, RooflineModel) else None

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._last_sampled.pop(request_id, None)

    def settle(self) -> None:
        """No step goes on any more that was begun ahead."""
        if isinstance(self.model, AheadModel):
            self.model.settle()

    def close(self) -> None:
        self.settle()
        self._kv_tensors = self._kv_caches = ()
        self._swap_memory = None
        self._last_sampled.clear()


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device={name}: torch {torch.__version__} sees no such device; use model.device=cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"model.dtype={name}: choose one of: auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capabilities = torch.cpu.get_capabilities()
        fast = any(capabilities.get(feature) for feature in _CPU_BFLOAT16)
    return torch.bfloat16 if fast else torch.float32


def _does_not_fit(num_blocks: int, needed: int, free: int | None) -> ConfigError:
    known = "an unknown amount" if free is None else f"{free / 2**20:.0f} MiB"
    return ConfigError(
        f"KV cache: {num_blocks} blocks need {needed / 2**20:.0f} MiB, but {known} of memory is free; "
        "lower cache.memory, cache.num_blocks or model.max_model_len"
    )
