"""The native decoder's families as one program: a step is one call of compiled code."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from core.batch import ModelBatch
from core.errors import PluginError
from core.model.arch import Architecture, read_architecture
from core.model.decoder import NativeModel
from core.model.interface import Linear, ModelContext
from core.model.layer_groups import LayerGroups
from core.model.layers import DecoderLayer, HeadNorm, RMSNorm
from core.model.loader import Loader
from core.model.optional_model import Argmax, argmax_of
from core.model.roofline import Roofline
from plugins.cpu.attention import bytes_per_token, cache_format
from plugins.cpu.library import Library, available
from plugins.cpu.packing import PackedMatrix
from plugins.cpu.profile import Profile
from plugins.cpu.program import Norm, OpList, Program, pointers
from plugins.cpu.quant import PackedLinear
from plugins.cpu.records import SUB, Format, Option, StepRecord
from plugins.cpu.settings import CpuModelSettings
from plugins.cpu.weight_file import StoredLoader, StoringLoader, WeightFile, prune, weight_path, writing

log = logging.getLogger("nonet.cpu")

ACTIVATIONS = {"silu": Option.SILU, "gelu_pytorch_tanh": Option.GELU_TANH, "gelu": Option.GELU}
MAX_HEAD_DIM = 512
POINTERS = ctypes.POINTER(ctypes.c_void_p)


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """The KV caches of the steps so far, which are the same in all of them."""

    of: Sequence[Tensor]
    pointers: ctypes.Array[ctypes.c_void_p]
    block_size: int


class CpuModel(NativeModel):
    """See `core.model.interface.Model`. The torch layers that it is made of are its slow twin, and what runs where sizes do not
    fit or nothing compiles.
    """

    Settings = CpuModelSettings

    def __init__(self, settings: CpuModelSettings, context: ModelContext):
        self._settings = settings
        self._library = available(settings.instructions)
        unfit = unfit_size(read_architecture(context.spec.config, settings.ignore_config_keys))
        if self._library is not None and unfit:
            log.warning(
                "native CPU code lacks sizes of this model, so the torch layers run, which are slower: %s", unfit
            )
            self._library = None
        super().__init__(settings, context)
        self._kv_shapes = [context.attention.kv_shape(spec, 1) for spec in self.attention_specs]
        self._group_of = LayerGroups.of(self.attention_specs, lambda spec: self._kv_shapes[spec.layer]).group_of
        self._num_groups = max(self._group_of, default=0) + 1
        self._vocab_size = self.architecture.vocab_size
        self._program = None if self._library is None else self._made_program(self._library, context)
        self._caches: Caches | None = None
        self._profile = Profile(self._program) if settings.profile and self._program is not None else None

    @property
    def is_native(self) -> bool:
        """Whether compiled code runs the steps, and not the torch layers."""
        return self._program is not None

    own_threads = is_native

    def forward(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        if self._program is None:
            return super().forward(batch, kv_caches)
        logits = torch.empty(len(batch.logits_indices), self._vocab_size)
        self._run(self._program, batch, kv_caches, logits=logits.data_ptr())
        return logits

    def forward_argmax(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Argmax:
        """See `core.model.optional_model.ArgmaxModel`: compiled code keeps no logits but the largest."""
        if self._program is None:
            return argmax_of(super().forward(batch, kv_caches))
        ids, peaks = torch.empty(len(batch.logits_indices), dtype=torch.int64), torch.empty(len(batch.logits_indices))
        wanted = {"best": ids.data_ptr(), "peaks": peaks.data_ptr()}
        most_ahead = 0 if self._profile else self._settings.overlap_requests
        self._run(self._program, batch, kv_caches, **wanted, most_ahead=most_ahead)
        return Argmax(ids, peaks)

    def settle(self) -> None:
        """See `core.model.optional_model.AheadModel`."""
        if self._program is not None:
            self._program.settle()
        self._caches = None  # or the pool would stay as long as the model

    def roofline(self) -> Roofline:
        """Of weights as they are packed, with the instructions and threads that multiply them."""
        if self._program is None:
            return super().roofline()
        layers = [one for layer in self.layers for one in matrices_of(layer)]
        head, form = packed(self.head).packed, layers[0].format
        bytes_per_s, operations_per_s = self._program.ceilings(form)
        return Roofline(
            weight_bytes=sum(one.num_bytes for one in layers) + head.num_bytes,
            linear_operations_per_token=2 * sum(one.n * one.k for one in layers),
            head_operations_per_row=2 * head.n * head.k,
            kv_bytes_per_context_token=sum(bytes_per_token(shape, self._dtype) for shape in self._kv_shapes),
            bytes_per_s=bytes_per_s,
            operations_per_s=operations_per_s,
            operations=() if self._profile is None else self._profile.times(),
        )

    def _run(self, program: Program, batch: ModelBatch, kv_caches: Sequence[Tensor], **wanted: int) -> None:
        """`wanted`: where results go and what else is asked, by their names in a StepRecord."""
        if self._caches is None or self._caches.of is not kv_caches:
            program.settle()
            self._caches = Caches(kv_caches, pointers(kv_caches), int(kv_caches[0].shape[1]) * SUB)
        tables, slots = self._tables(batch)
        table_pointers, slot_pointers = pointers(tables), pointers(slots)
        ids, positions, starts, rows = (
            tensor.contiguous()
            for tensor in (batch.input_ids, batch.positions, batch.query_start_loc, batch.logits_indices)
        )
        step = StepRecord(
            num_tokens=len(ids),
            num_requests=len(starts) - 1,
            num_logits=len(rows),
            num_columns=batch.block_table.shape[1],
            token_ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            query_start=starts.data_ptr(),
            tables=ctypes.cast(table_pointers, POINTERS),
            slots=ctypes.cast(slot_pointers, POINTERS),
            wanted=rows.data_ptr(),
            caches=ctypes.cast(self._caches.pointers, POINTERS),
            block_size=self._caches.block_size,
            seconds=None if self._profile is None else self._profile.counting(len(ids) == len(starts) - 1),
            **wanted,
        )
        program.run(step)

    def _tables(self, batch: ModelBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Of each group. A batch of one group has one for all."""
        if batch.group_block_tables is None or batch.group_slot_mappings is None:
            one = [batch.block_table.contiguous()], [batch.slot_mapping.contiguous()]
            return one[0] * self._num_groups, one[1] * self._num_groups
        return (
            [batch.block_table.contiguous(), *batch.group_block_tables.contiguous()],
            [batch.slot_mapping.contiguous(), *batch.group_slot_mappings.contiguous()],
        )

    def _loader(self, context: ModelContext) -> Loader:
        if self._library is None or not self._settings.weight_cache:
            return super()._loader(context)
        path = weight_path(context, self.architecture)
        stored = WeightFile.open(path) or self._stored(path, context)
        return super()._loader(context) if stored is None else StoredLoader(stored, self._library, context)

    def _stored(self, path: Path, context: ModelContext) -> WeightFile | None:
        """Weights in a new file; None where it cannot be written."""
        try:
            with writing(path) as writer:
                self._load(StoringLoader(super()._loader(context), writer), context)
            prune(path.parent, self._settings.weight_cache_bytes, keep=path)
        except OSError as error:
            log.warning("packed weights are not kept for the next start: %s", error)
            return None
        return WeightFile.open(path)

    def _load_embedding(self, loader: Loader) -> Tensor:
        """Compiled code reads rows of the head where that is the same matrix."""
        if self._library is not None and self.architecture.tied_embeddings:
            return torch.empty(0, self.architecture.hidden_size)
        return super()._load_embedding(loader)

    def _made_program(self, library: Library, context: ModelContext) -> Program:
        arch, ops = self.architecture, OpList()
        x, head = ops.floats(arch.hidden_size), packed(self.head)
        ropes = [ops.rope(rope.frequencies.contiguous(), rope.scale) for rope in self.ropes]
        head_matrix = ops.matrix(head.packed)
        if arch.tied_embeddings:
            ops.embed_tied(head_matrix, arch.embedding_scale, x)
        else:
            form = Format.FLOAT32 if self.embedding.dtype == torch.float32 else Format.BFLOAT16
            ops.embed(self.embedding, form, arch.embedding_scale, x)
        emit = LayerOps(ops, x, arch.hidden_size)
        for index, layer, group in zip(count(), self.layers, self._group_of, strict=False):
            emit.layer(index, layer, arch.layers[index].activation, ropes[layer.rope], group)
        rows = emit.rows(arch.hidden_size, head.packed.format)
        ops.logits(x, norm_of(self.norm), rows, head_matrix, arch.final_softcap)
        return Program(library, torch.get_num_threads(), ops, cache_format(self._kv_shapes[0], context.dtype))


def unfit_size(arch: Architecture) -> str:
    """What the kernels do not have; empty where they have it all."""
    if arch.hidden_size % 16:
        return f"hidden_size {arch.hidden_size} is no multiple of 16"
    for plan in arch.layers:
        dim = plan.attention.head_dim
        if dim % 16 or dim > MAX_HEAD_DIM:
            return f"head_dim {dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
        if plan.intermediate_size % 32:
            return f"intermediate_size {plan.intermediate_size} is no multiple of 32"
    return ""


class LayerOps:
    """Emits the operations of layers, which share their buffers."""

    def __init__(self, ops: OpList, x: int, hidden_size: int):
        self._ops = ops
        self._x = x
        self._hidden_size = hidden_size
        self._rows: dict[tuple[int, Format], int] = {}
        self._floats: dict[int, int] = {}

    def rows(self, width: int, form: Format) -> int:
        key = (width, form.of_rows)
        if key not in self._rows:
            self._rows[key] = self._ops.rows(width, form)
        return self._rows[key]

    def floats(self, width: int) -> int:
        if width not in self._floats:
            self._floats[width] = self._ops.floats(width)
        return self._floats[width]

    def layer(self, index: int, layer: DecoderLayer, activation: str, rope: int, group: int) -> None:
        ops, attention, mlp = self._ops, layer.attention, layer.mlp
        qkv, out, gate_up, down = (packed(one) for one in (attention.qkv, attention.out, mlp.gate_up, mlp.down))
        spec = attention.spec
        heads = self.floats(qkv.packed.n)
        self._norm_linear(layer.before_attention, qkv, heads)
        attended = self.rows(out.packed.k, out.packed.format)
        aligned = spec.num_heads // spec.num_kv_heads * spec.head_dim % 32 == 0
        target = attended if aligned else self.floats(out.packed.k)
        norms = None if attention.head_norm is None else head_norms(attention.head_norm)
        ops.attention(heads, spec, target, group=group, layer=index, rope=rope, norms=norms)
        if not aligned:
            ops.convert(target, attended)
        self._add(attended, out, layer.after_attention)
        source = self.rows(self._hidden_size, gate_up.packed.format)
        ops.norm(self._x, norm_of(layer.before_mlp), source)
        gated = self.rows(down.packed.k, down.packed.format)
        ops.gated(source, ops.matrix(gate_up.packed), gated, ACTIVATIONS[activation])
        self._add(gated, down, layer.after_mlp)

    def _norm_linear(self, norm: RMSNorm, linear: PackedLinear, target: int) -> None:
        source = self.rows(self._hidden_size, linear.packed.format)
        self._ops.norm(self._x, norm_of(norm), source)
        self._ops.linear(source, self._ops.matrix(linear.packed), target)

    def _add(self, source: int, linear: PackedLinear, norm: RMSNorm | None) -> None:
        """To the residual stream, behind a norm of its own where there is one."""
        matrix = self._ops.matrix(linear.packed)
        if norm is None:
            self._ops.linear(source, matrix, self._x, Option.ADD)
            return
        made = self.floats(self._hidden_size)
        self._ops.linear(source, matrix, made)
        self._ops.norm_add(made, norm_of(norm), self._x)


def packed(linear: Linear) -> PackedLinear:
    if not isinstance(linear, PackedLinear):
        raise PluginError("model=cpu: the weights are not in tiles; choose quant=cpu_bf16")
    return linear


def matrices_of(layer: DecoderLayer) -> list[PackedMatrix]:
    linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    return [packed(linear).packed for linear in linears]


def norm_of(norm: RMSNorm) -> Norm:
    return Norm(norm.weight.contiguous(), norm.eps)


def head_norms(norm: HeadNorm) -> tuple[Norm, Norm]:
    return Norm(norm.q.contiguous(), norm.eps), Norm(norm.k.contiguous(), norm.eps)
