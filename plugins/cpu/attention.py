"""Paged attention in compiled code (`native/attention.h`)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.batch import ModelBatch
from core.errors import ConfigError, PluginError
from core.model.interface import AttentionContext, AttentionSpec
from plugins.cpu.library import Library, available
from plugins.cpu.program import OpList, Program, pointers
from plugins.cpu.records import SUB, Format, Kind, StepRecord
from plugins.cpu.settings import CpuAttentionSettings
from plugins.cpu.torch_attention import HEAD_BYTES, Blocks, Int8Blocks, Share, attend, plan

CACHE_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
MAX_HEAD_DIM = 512


def cache_format(shape: Sequence[int], dtype: torch.dtype) -> Format:
    """Of a KV cache, by its shape (`CpuPaged.kv_shape`): bytes of int8 lie in fewer axes than numbers of `dtype`."""
    return Format.INT8 if len(shape) == 4 else CACHE_FORMATS[dtype]


def bytes_per_token(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Of a KV cache of that shape."""
    return math.prod(shape) * dtype.itemsize / (shape[0] * shape[1] * SUB)


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One batch, or the layers of one group of it, as a step wants it."""

    positions: Tensor  # [T] int64
    query_start_loc: Tensor  # [N + 1] int32
    block_table: Tensor  # [N, B] int32
    slot_mapping: Tensor  # [T] int64
    shares: Mapping[int | None, Sequence[Share]]  # by window; empty where compiled code runs


class CpuPaged:
    """See `core.model.interface.AttentionBackend`. A row's result depends neither on its batch mates nor on threads.

    Raises ConfigError for a `cache.block_size` that is no multiple of 16.
    """

    Settings = CpuAttentionSettings

    def __init__(self, settings: CpuAttentionSettings, context: AttentionContext):
        if context.block_size % SUB:
            raise ConfigError(f"cache.block_size={context.block_size}: attention=cpu_paged wants a multiple of {SUB}")
        if context.dtype not in CACHE_FORMATS:
            raise ConfigError(f"model.dtype={context.dtype}: attention=cpu_paged takes bfloat16 or float32")
        self._library = available(settings.instructions)
        self._block_size = context.block_size
        self._is_int8 = settings.kv_format == "int8"
        self._dtype = context.dtype
        self._programs: dict[AttentionSpec, Program] = {}

    def kv_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        subs, heads, numbers = self._block_size // SUB, spec.num_kv_heads, SUB * spec.head_dim
        if self._is_int8:
            if spec.head_dim % 4:
                raise PluginError(
                    f"attention.kv_format=int8: head_dim {spec.head_dim} is no multiple of 4; choose auto"
                )
            return (num_blocks, subs, heads, (HEAD_BYTES + 2 * numbers) // self._dtype.itemsize)
        return (num_blocks, subs, heads, 2, numbers)

    def prepare(self, batch: ModelBatch, specs: Sequence[AttentionSpec]) -> Pages:
        positions, starts = batch.positions.contiguous(), batch.query_start_loc.contiguous()
        table, slots = batch.block_table.contiguous(), batch.slot_mapping.contiguous()
        windows = {spec.sliding_window for spec in specs} if self._library is None else set()
        shares = {window: plan((positions, starts, table), self._block_size, window) for window in windows}
        return Pages(positions, starts, table, slots, shares)

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Pages
    ) -> Tensor:
        if self._library is None:
            blocks = Int8Blocks(kv_cache, spec) if self._is_int8 else Blocks(kv_cache, spec)
            return attend(spec, q, k, v, blocks, metadata.slot_mapping, metadata.shares[spec.sliding_window])
        program = self._program(spec, self._library)
        given = torch.cat((q, k, v), 1).float().contiguous()  # [T, heads of all three, head_dim]
        out = torch.empty(q.shape, dtype=torch.float32)
        tables, slots, caches = (pointers([one]) for one in (metadata.block_table, metadata.slot_mapping, kv_cache))
        program.run(
            StepRecord(
                num_tokens=len(q),
                num_requests=len(metadata.query_start_loc) - 1,
                num_columns=metadata.block_table.shape[1],
                positions=metadata.positions.data_ptr(),
                query_start=metadata.query_start_loc.data_ptr(),
                tables=ctypes.cast(tables, ctypes.POINTER(ctypes.c_void_p)),
                slots=ctypes.cast(slots, ctypes.POINTER(ctypes.c_void_p)),
                caches=ctypes.cast(caches, ctypes.POINTER(ctypes.c_void_p)),
                input=given.data_ptr(),
                output=out.data_ptr(),
                block_size=self._block_size,
            )
        )
        return out.to(self._dtype)

    def _program(self, spec: AttentionSpec, library: Library) -> Program:
        shape = replace(spec, layer=0)
        if shape not in self._programs:
            if spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM:
                raise PluginError(
                    f"attention=cpu_paged: head_dim {spec.head_dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
                )
            ops = OpList()
            heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            source, target = ops.floats(heads, Kind.INPUT), ops.floats(spec.num_heads * spec.head_dim, Kind.OUTPUT)
            ops.attention(source, shape, target)
            form = cache_format(self.kv_shape(spec, 1), self._dtype)
            self._programs[shape] = Program(library, torch.get_num_threads(), ops, form)
        return self._programs[shape]
