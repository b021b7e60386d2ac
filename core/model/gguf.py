"""GGUF files: a memory-mapped reader that trusts nothing in the header. Torch is imported where tensors are returned.

Layout (https://github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts, key/values, tensor table, padding, data.
Every count, size and offset is compared with the file size and with fixed bounds before anything of that size is made;
the bounds keep the worst accepted header under 200 MB of Python objects (CVE-2025-0317, CVE-2026-33298 and kin).
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from core.errors import ModelFileError
from core.model.block_formats import FORMATS, BlockFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10  # of one key or tensor name
MAX_ARRAY_ITEMS = 1 << 21  # over all arrays of one file; a vocabulary of 262,144 with scores and merges takes half
MAX_STRING_BYTES = 1 << 25  # over all strings of one file
MAX_DIMS = 4
MAX_FLOATS = 1 << 16  # of a tensor that is read as Python numbers

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. `shape` in torch order ([out, in] for a matrix); `offset` in bytes from the file start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int

    @property
    def block_format(self) -> BlockFormat:
        return FORMATS[self.type_id]


class _Cursor:
    """Reads the header front to back; each read is checked against what is left of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.size = len(data)
        self.pos = 0
        self.items_left = MAX_ARRAY_ITEMS
        self.string_bytes_left = MAX_STRING_BYTES

    def fail(self, field: str, problem: str) -> NoReturn:
        shown = field if field.isprintable() else ascii(field)  # names from the file may hold control characters
        raise ModelFileError(f"{self.path}: {shown}: {problem}")

    def take(self, nbytes: int, field: str) -> int:
        """Step over `nbytes`; returns where they start."""
        if nbytes > self.size - self.pos:
            self.fail(
                field, f"needs {nbytes} bytes at offset {self.pos}, but the file ends at {self.size} (truncated?)"
            )
        start = self.pos
        self.pos += nbytes
        return start

    def unsigned(self, width: int, field: str) -> int:
        start = self.take(width, field)
        return int.from_bytes(self.data[start : start + width], "little")

    def name(self, field: str) -> str:
        length = self.unsigned(8, f"{field} length")
        if length > MAX_NAME_BYTES:
            self.fail(f"{field} length", f"{length} bytes is over the limit of {MAX_NAME_BYTES}")
        start = self.take(length, field)
        return self._decode(self.data[start : start + length], field)

    def strings(self, count: int, field: str) -> list[str]:
        """`count` length-prefixed UTF-8 strings. One tight loop: vocabularies hold hundreds of thousands."""
        if count * 8 > self.size - self.pos:
            self.fail(field, f"{count} strings cannot fit in the {self.size - self.pos} bytes left of the file")
        data, size, pos, budget = self.data, self.size, self.pos, self.string_bytes_left
        length_at = struct.Struct("<Q").unpack_from
        pieces: list[str] = []
        for index in range(count):
            end_of_length = pos + 8
            length: int = length_at(data, pos)[0] if end_of_length <= size else size
            if length > size - end_of_length or length > budget:
                self.fail(f"{field}[{index}]", f"string of {length} bytes passes the end of the file or the size limit")
            budget -= length
            pos = end_of_length + length
            try:
                pieces.append(data[end_of_length:pos].decode())
            except UnicodeDecodeError:
                self.fail(f"{field}[{index}]", "is not valid UTF-8")
        self.pos, self.string_bytes_left = pos, budget
        return pieces

    def value(self, value_type: int, field: str) -> object:
        if value_type == _STRING:
            return self.strings(1, field)[0]
        if value_type == _ARRAY:
            return self._array(field)
        return self._scalars(value_type, 1, field)[0]

    def _array(self, field: str) -> tuple[object, ...]:
        item_type = self.unsigned(4, f"{field} item type")
        count = self.unsigned(8, f"{field} length")
        if item_type == _ARRAY:
            self.fail(field, "arrays of arrays are not supported")
        if count > self.items_left:
            self.fail(
                f"{field} length", f"{count} items are over the limit of {MAX_ARRAY_ITEMS} for all arrays of a file"
            )
        self.items_left -= count
        if item_type == _STRING:
            return tuple(self.strings(count, field))
        return self._scalars(item_type, count, field)

    def _scalars(self, value_type: int, count: int, field: str) -> tuple[object, ...]:
        code = _SCALARS.get(value_type)
        if code is None:
            self.fail(field, f"value type {value_type} is unknown")
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self.data, self.take(layout.size, field))

    def _decode(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(field, "is not valid UTF-8")


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version, then the numbers of tensors and of key/values."""
    magic = cursor.data[cursor.take(4, "magic") : 4]
    if magic != MAGIC:
        cursor.fail("magic", f"{magic!r} is not {MAGIC!r}: this is not a GGUF file")
    version = cursor.unsigned(4, "version")
    if version and version & 0xFFFF == 0:
        cursor.fail("version", "the file is big-endian; only little-endian GGUF is supported")
    if version not in VERSIONS:
        cursor.fail("version", f"{version} is not supported (2 and 3 are); convert the model again with a current tool")
    num_tensors = cursor.unsigned(8, "tensor_count")
    num_keys = cursor.unsigned(8, "metadata_kv_count")
    if num_tensors > MAX_TENSORS:
        cursor.fail("tensor_count", f"{num_tensors} is over the limit of {MAX_TENSORS}")
    if num_keys > MAX_KEYS:
        cursor.fail("metadata_kv_count", f"{num_keys} is over the limit of {MAX_KEYS}")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {index} {key}", "appears twice")
        metadata[key] = cursor.value(cursor.unsigned(4, f"{key} value type"), key)
    return metadata


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value <= 0 or value > MAX_ALIGNMENT or value & (value - 1):
        cursor.fail("general.alignment", f"{value!r} is not a power of two from 1 to {MAX_ALIGNMENT}")
    return value


def _read_shape(cursor: _Cursor, field: str) -> tuple[int, ...]:
    num_dims = cursor.unsigned(4, f"{field} dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{field} dimensions", f"{num_dims} is not from 1 to {MAX_DIMS}")
    dims = [cursor.unsigned(8, f"{field} shape") for _ in range(num_dims)]
    if min(dims) < 1:
        cursor.fail(f"{field} shape", f"{dims} has an empty dimension")
    return tuple(reversed(dims))  # the file stores the fastest dimension first


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One row of the table; `offset` is still relative to the data section."""
    name = cursor.name(f"tensor name {index}")
    field = f"tensor {name}"
    shape = _read_shape(cursor, field)
    type_id = cursor.unsigned(4, f"{field} type")
    block_format = FORMATS.get(type_id)
    if block_format is None:
        cursor.fail(f"{field} type", f"ggml type {type_id} is unknown")
    if shape[-1] % block_format.block_size:
        cursor.fail(f"{field} shape", f"rows of {shape[-1]} are not whole {block_format.name} blocks")
    # Python integers do not overflow: a product of hostile dimensions is just large, and fails the bounds check below.
    nbytes = math.prod(shape) // block_format.block_size * block_format.block_bytes
    return TensorInfo(name, shape, type_id, cursor.unsigned(8, f"{field} offset"), nbytes)


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    table = [_read_tensor(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end = data_start
    for info in sorted(table, key=lambda entry: entry.offset):
        field = f"tensor {info.name} offset"
        start = data_start + info.offset
        if info.name in tensors:
            cursor.fail(f"tensor {info.name}", "appears twice")
        if info.offset % alignment:
            cursor.fail(field, f"{info.offset} is not a multiple of the alignment {alignment}")
        if start < end:
            cursor.fail(field, f"{info.offset} overlaps the tensor before it")
        if start > cursor.size or info.nbytes > cursor.size - start:
            cursor.fail(field, f"{info.nbytes} bytes at {start} pass the end of the file at {cursor.size} (truncated?)")
        end = start + info.nbytes
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type_id, start, info.nbytes)
    return {info.name: tensors[info.name] for info in table}


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: file size: the file is empty") from None
    except OSError as error:
        raise ModelFileError(f"{path}: file: cannot be opened ({error.strerror})") from error


class GGUFFile:
    """A GGUF model file, mapped read-only. Tensors returned by `raw` keep the mapping alive; `read` returns copies."""

    def __init__(
        self, path: Path, data: mmap.mmap, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata: Mapping[str, object] = MappingProxyType(dict(metadata))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self._data = data

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map the file and read its header. Raises ModelFileError naming the file and the field."""
        path = Path(path)
        cursor = _Cursor(_map_file(path), path)
        num_tensors, num_keys = _read_counts(cursor)
        metadata = _read_metadata(cursor, num_keys)
        shards = metadata.get("split.count", 0)
        if shards not in (0, 1):
            cursor.fail(
                "split.count", f"one of {shards} shards; merge them into one file first (llama-gguf-split --merge)"
            )
        tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, metadata))
        return cls(path, cursor.data, metadata, tensors)

    def info(self, name: str) -> TensorInfo:
        """Raises ModelFileError when the file has no such tensor."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelFileError(f"{self.path}: tensor {name}: is missing from the file")
        return found

    def floats(self, name: str) -> tuple[float, ...]:
        """The values of an F32 tensor of at most MAX_FLOATS, without torch. Raises ModelFileError for others."""
        info = self.info(name)
        count = math.prod(info.shape)
        if info.block_format.name != "F32" or count > MAX_FLOATS:
            raise ModelFileError(
                f"{self.path}: tensor {name}: is {info.block_format.name} of shape {list(info.shape)}, "
                f"not F32 of at most {MAX_FLOATS} values"
            )
        return struct.unpack_from(f"<{count}f", self._data, info.offset)

    @cached_property
    def _bytes(self) -> Tensor:
        """uint8 [file size], the mapping itself."""
        import torch

        with warnings.catch_warnings():
            # The mapping is read-only on purpose; torch cannot express that and warns.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._data, dtype=torch.uint8)

    def raw(self, name: str) -> Tensor:
        """uint8 [nbytes], a view of the mapping. Never write to it: the pages are read-only."""
        info = self.info(name)
        return self._bytes[info.offset : info.offset + info.nbytes]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor dequantised to `dtype` (float32), in its shape. Raises ModelFileError for types that cannot be read."""
        import torch

        from core.model.dequant import UNPACKERS, dequantize

        info = self.info(name)
        if info.block_format.name not in UNPACKERS:
            raise ModelFileError(
                f"{self.path}: tensor {name}: type {info.block_format.name} is not supported "
                f"(supported: {', '.join(sorted(UNPACKERS))})"
            )
        rows = math.prod(info.shape[:-1])
        return dequantize(self.raw(name).view(rows, -1), info.block_format, dtype or torch.float32).view(info.shape)
