"""Lists of operations, and what runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from core.errors import NonetError
from core.model.interface import AttentionSpec
from plugins.cpu.library import Library
from plugins.cpu.packing import PackedMatrix
from plugins.cpu.records import (
    AheadCounts,
    BufferRecord,
    Code,
    Format,
    Heads,
    Kind,
    MatrixRecord,
    ModelRecord,
    Op,
    RopeRecord,
    StepRecord,
    array,
)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm. `weight` float32 [width], any offset already added."""

    weight: Tensor
    eps: float


@dataclass(slots=True, eq=False)
class OpList:
    """Operations in the order in which they run. Buffers and matrices are named by the numbers that adding them gives."""

    ops: list[Op] = field(default_factory=list)
    buffers: list[BufferRecord] = field(default_factory=list)
    matrices: list[MatrixRecord] = field(default_factory=list)
    ropes: list[RopeRecord] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # what the records point to

    def floats(self, width: int, kind: Kind = Kind.FLOATS) -> int:
        self.buffers.append(BufferRecord(width, kind))
        return len(self.buffers) - 1

    def rows(self, width: int, form: Format) -> int:
        """Activations as a matrix of that format reads them."""
        self.buffers.append(BufferRecord(width, form.of_rows))
        return len(self.buffers) - 1

    def matrix(self, packed: PackedMatrix) -> int:
        self.kept.append(packed)
        self.matrices.append(packed.record())
        return len(self.matrices) - 1

    def rope(self, frequencies: Tensor, scale: float) -> int:
        """`frequencies` float32 [head_dim / 2], radians per position."""
        self.kept.append(frequencies)
        self.ropes.append(RopeRecord(frequencies.data_ptr(), len(frequencies), scale))
        return len(self.ropes) - 1

    def embed(self, table: Tensor, form: Format, scale: float, target: int) -> None:
        """`table` [vocab, width] in rows."""
        self.ops.append(
            Op(code=Code.EMBED, target=target, matrix=-1, option=form, factor=scale, table=self._pointer(table))
        )

    def embed_tied(self, matrix: int, scale: float, target: int) -> None:
        """Rows of the head's matrix."""
        self.ops.append(Op(code=Code.EMBED, target=target, matrix=matrix, factor=scale))

    def norm(self, source: int, norm: Norm, target: int) -> None:
        self.ops.append(
            Op(code=Code.NORM, source=source, target=target, eps=norm.eps, weight=self._pointer(norm.weight))
        )

    def norm_add(self, source: int, norm: Norm, target: int) -> None:
        self.ops.append(
            Op(code=Code.NORM_ADD, source=source, target=target, eps=norm.eps, weight=self._pointer(norm.weight))
        )

    def linear(self, source: int, matrix: int, target: int, option: int = 0) -> None:
        self.ops.append(Op(code=Code.LINEAR, source=source, target=target, matrix=matrix, option=option))

    def gated(self, source: int, matrix: int, target: int, activation: int) -> None:
        self.ops.append(Op(code=Code.GATED, source=source, target=target, matrix=matrix, option=activation))

    def convert(self, source: int, target: int) -> None:
        self.ops.append(Op(code=Code.CONVERT, source=source, target=target))

    def attention(
        self,
        source: int,
        spec: AttentionSpec,
        target: int,
        *,
        group: int = 0,
        layer: int = 0,
        rope: int = -1,
        norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        """`source`: q, k and v of each token. `norms`: of the heads of q and of k."""
        op = Op(
            code=Code.ATTENTION, source=source, target=target, layer=layer, group=group, rope=rope, heads=heads_of(spec)
        )
        if norms is not None:
            op.eps, op.weight = norms[0].eps, self._pointer(norms[0].weight)
            op.key_weight = self._pointer(norms[1].weight)
        self.ops.append(op)

    def logits(self, source: int, norm: Norm, rows: int, matrix: int, softcap: float | None) -> None:
        self.ops.append(
            Op(
                code=Code.LOGITS,
                source=source,
                target=rows,
                matrix=matrix,
                eps=norm.eps,
                weight=self._pointer(norm.weight),
                factor=softcap or 0.0,
            )
        )

    def _pointer(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()


def heads_of(spec: AttentionSpec) -> Heads:
    return Heads(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.sliding_window or 0, spec.softcap or 0.0
    )


class Program:
    """An `OpList` that runs. Raises MemoryError where memory lacks."""

    def __init__(self, library: Library, num_threads: int, ops: OpList, cache_format: Format):
        self._library = library
        self._kept = ops.kept
        self._arrays = (
            array(Op, [*ops.ops]),
            array(BufferRecord, [*ops.buffers]),
            array(MatrixRecord, [*ops.matrices]),
            array(RopeRecord, [*ops.ropes]),
        )
        lengths = (len(ops.ops), len(ops.buffers), len(ops.matrices), len(ops.ropes))
        self.ops, self.matrices = tuple(ops.ops), tuple(ops.matrices)
        self._team = _team(library, num_threads)
        record = ModelRecord(*lengths, *self._arrays, self._team, cache_format)
        self._handle = library.handle.nonet_new(ctypes.byref(record))
        if not self._handle:
            raise MemoryError("native code: no memory for a model")

    def run(self, step: StepRecord) -> None:
        """Without the interpreter's lock."""
        if self._library.handle.nonet_step(self._handle, ctypes.byref(step)):
            raise MemoryError(f"native code: no memory for a step of {step.num_tokens} tokens")

    def settle(self) -> None:
        """End what was begun ahead: afterwards nothing reads or writes KV until the next step."""
        self._library.handle.nonet_settle(self._handle)

    @property
    def ahead(self) -> AheadCounts:
        counts = AheadCounts()
        self._library.handle.nonet_counts(self._handle, ctypes.byref(counts))
        return counts

    def ceilings(self, form: Format) -> tuple[float, float]:
        """Bytes read, and operations with weights of this format, per second: measured now, in about a second."""
        rates = (ctypes.c_double * 2)()
        if self._library.handle.nonet_ceilings(self._team, form, rates):
            raise MemoryError("native code: no memory to read from")
        return rates[0], rates[1]

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.handle.nonet_free(self._handle)


@cache
def _team(library: Library, num_threads: int) -> int:
    """One for each number of threads, as long as the process lives. Raises NonetError where the system gives fewer."""
    team = library.handle.nonet_team(num_threads)
    if not team:
        raise NonetError(
            f"the system does not give {num_threads} threads; lower executor.num_threads, or raise what limits them "
            "(`ulimit -u -v`)"
        )
    return int(team)


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(tensors), 1))(*(tensor.data_ptr() for tensor in tensors))
