"""The structs of `native/program.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

ABI = 6
TILE = 32  # outputs of a tile of a matrix
GROUP = 32  # activations that share a scale
SUB = 16  # tokens of a block of the cache, as kernels see it


class Format(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT8_GROUPS = 4  # a scale for 32 weights, not for an output

    @property
    def of_rows(self) -> Format:
        """Of the activations that a weight of this format is multiplied with."""
        return Format.INT8 if self > Format.INT8 else self


class Kind(IntEnum):
    """Of a buffer that holds floats."""

    FLOATS = -1
    INPUT = -2
    OUTPUT = -3


class Code(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    GATED = 3
    ATTENTION = 4
    NORM_ADD = 5
    CONVERT = 6
    LOGITS = 7


class Option(IntEnum):
    ADD = 1  # LINEAR
    SILU = 0  # GATED
    GELU_TANH = 1
    GELU = 2


class Heads(Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("window", c_int32),
        ("softcap", c_float),
    ]


class Op(Structure):
    _fields_ = [
        ("code", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("matrix", c_int32),
        ("layer", c_int32),
        ("group", c_int32),
        ("rope", c_int32),
        ("option", c_int32),
        ("heads", Heads),
        ("eps", c_float),
        ("factor", c_float),
        ("weight", c_void_p),
        ("key_weight", c_void_p),
        ("table", c_void_p),
    ]


class BufferRecord(Structure):
    _fields_ = [("width", c_int32), ("format", c_int32)]


class RopeRecord(Structure):
    _fields_ = [("frequencies", c_void_p), ("half", c_int32), ("scale", c_float)]


class MatrixRecord(Structure):
    _fields_ = [
        ("format", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("num_tiles", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    ]


class StepRecord(Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_requests", c_int32),
        ("num_logits", c_int32),
        ("num_columns", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("tables", POINTER(c_void_p)),
        ("slots", POINTER(c_void_p)),
        ("wanted", c_void_p),
        ("caches", POINTER(c_void_p)),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("peaks", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("block_size", c_int64),
        ("most_ahead", c_int64),
        ("seconds", c_void_p),
    ]


class AheadCounts(Structure):
    """Steps that were begun before they were asked for, and those of them that were asked for."""

    _fields_ = [("begun", c_int64), ("used", c_int64)]


class ModelRecord(Structure):
    _fields_ = [
        ("num_ops", c_int32),
        ("num_buffers", c_int32),
        ("num_matrices", c_int32),
        ("num_ropes", c_int32),
        ("ops", POINTER(Op)),
        ("buffers", POINTER(BufferRecord)),
        ("matrices", POINTER(MatrixRecord)),
        ("ropes", POINTER(RopeRecord)),
        ("team", c_void_p),
        ("cache_format", c_int64),
    ]


def array(kind: type[ctypes.Structure], items: list[ctypes.Structure]) -> ctypes.Array[ctypes.Structure]:
    return (kind * max(len(items), 1))(*items)
