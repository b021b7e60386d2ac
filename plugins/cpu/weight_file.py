"""Packed weights on disk: written once from a model's files, then read whole at every start, into large pages.

A file is data at multiples of 64 bytes, a JSON index, its length in 8 bytes, and `MAGIC`. It is named by all that its content
depends on, and comes into being complete.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor

from core.errors import ModelFileError
from core.model import decoder, dequant, gguf_weights, layers, loader, quantized, weights
from core.model.arch import Architecture
from core.model.file_cache import default_cache_dir
from core.model.interface import Linear, ModelContext
from core.model.loader import Loader, WeightPart
from core.model.spec import ModelFiles, quantization_of
from plugins.cpu import packing, quant, weight_index
from plugins.cpu.library import Library
from plugins.cpu.packing import PackedMatrix
from plugins.cpu.quant import PackedLinear
from plugins.cpu.records import Format
from plugins.cpu.weight_index import ALIGNMENT, DTYPES, Index, StoredMatrix, StoredTensor

log = logging.getLogger("nonet.cpu")

MADE_BY = (packing, quant, weight_index, decoder, dequant, gguf_weights, layers, loader, weights)
"""What a file's content depends on beside the model."""
MAGIC = b"nonetpw2"
SUFFIX = ".weights"
MAX_INDEX_BYTES = 1 << 26
STALE_S = 86_400.0  # nobody writes for that long


def weight_path(context: ModelContext, arch: Architecture) -> Path:
    """Where the packed weights of this model, these formats and this code lie."""
    depends_on = (
        *(Path(str(module.__file__)).read_bytes() for module in MADE_BY),
        *(path.read_bytes() for path in sorted(Path(str(quantized.__file__)).parent.glob("*.py"))),
        _identity(context.spec.files),
        repr(quantization_of(context.spec.config)),
        repr(arch),
        str(context.dtype),
        type(context.quant).__qualname__,
    )
    key = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:24]
    return default_cache_dir() / "packed" / f"{key}{SUFFIX}"


def _identity(files: ModelFiles) -> list[tuple[str, int, int, int]]:
    """Of each file that holds weights: path, size, and times of the last change, of which a copy may keep only the first."""
    paths = sorted(files.path.glob("*.safetensors")) if files.path.is_dir() else [files.path]
    found = [(str(path.resolve()), path.stat()) for path in paths]
    return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in found]


class Writer:
    """Takes weights one after another, so that no more than one is in memory."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._tensors: dict[str, StoredTensor] = {}
        self._matrices: dict[str, StoredMatrix] = {}

    def tensor(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = self._stored(tensor)

    def matrix(self, name: str, packed: PackedMatrix) -> None:
        tensors = {"data": packed.data, "scales": packed.scales, "bias": packed.bias}
        stored = {part: self._stored(tensor) for part, tensor in tensors.items() if tensor is not None}
        self._matrices[name] = StoredMatrix(int(packed.format), packed.n, packed.k, **stored)

    def finish(self) -> None:
        index = msgspec.json.encode(Index(self._tensors, self._matrices))
        self._file.write(index + len(index).to_bytes(8, "little") + MAGIC)

    def _stored(self, tensor: Tensor) -> StoredTensor:
        start = self._file.tell()
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        return StoredTensor(str(tensor.dtype), list(tensor.shape), start)


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """The file appears at `path` when the block has ended well. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
        try:
            writer = Writer(file)
            yield writer
            writer.finish()
            file.flush()
            os.fsync(file.fileno())  # or the name may be there after a power cut, and the weights not
            os.replace(file.name, path)  # two processes at once make the same
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


class WeightFile:
    """All of one file, in memory. Tensors are views of it."""

    def __init__(self, path: Path, data: Tensor, index: Index):
        self._path = path
        self._data = data
        self._index = index

    @classmethod
    def open(cls, path: Path) -> WeightFile | None:
        """None where there is none. One that is spoilt is removed, and told."""
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "no regular file", str(path))
            with path.open("rb") as file:
                found = cls(path, *_read(file))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("packed weights %s cannot be read (%s); they are made again", path.name, error)
            with suppress(OSError):
                path.unlink()
            return None
        except OSError as error:  # no memory, no right to read: nothing is wrong with the file
            log.warning("packed weights %s cannot be read: %s", path.name, error)
            return None
        with suppress(OSError):  # another user's
            os.utime(path)  # used now: `prune` takes those that nobody has used for longest
        return found

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stored = self._index.tensors.get(name)
        if stored is None or (stored.shape, stored.dtype) != (list(shape), str(dtype)):
            raise self._missing(f"{name} of {list(shape)} {dtype}")
        return self._view(stored)

    def matrix(self, name: str, n: int, k: int, bias: bool) -> PackedMatrix:
        stored = self._index.matrices.get(name)
        if stored is None or (stored.n, stored.k, stored.bias is not None) != (n, k, bias):
            raise self._missing(f"{name} of {n} x {k} {'with' if bias else 'without'} a bias")
        scales, biases = (None if part is None else self._view(part) for part in (stored.scales, stored.bias))
        return PackedMatrix(Format(stored.format), n, k, self._view(stored.data), scales, biases)

    def _missing(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"packed weights {self._path}: {what} is not among them; remove the file, or set model.weight_cache=false"
        )

    def _view(self, stored: StoredTensor) -> Tensor:
        bytes_of = self._data[stored.start : stored.start + stored.num_bytes]
        return bytes_of.view(DTYPES[stored.dtype]).view(stored.shape)


def _read(file: IO[bytes]) -> tuple[Tensor, Index]:
    """Raises ValueError for what is no such file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 16, 0))
    length, magic = int.from_bytes(file.read(8), "little"), file.read()
    if magic != MAGIC or not 0 < length <= min(size - 16, MAX_INDEX_BYTES):
        raise ValueError("its end is missing")
    file.seek(size - 16 - length)
    index = Index.read(file.read(length), size - 16 - length)
    memory = _large_pages(max(size - 16 - length, mmap.PAGESIZE))
    file.seek(0)
    with memoryview(memory) as view:
        if file.readinto(view[: size - 16 - length]) != size - 16 - length:  # type: ignore[attr-defined]
            raise ValueError("it ends too early")
    return torch.frombuffer(memory, dtype=torch.uint8), index


def _large_pages(size: int) -> mmap.mmap:
    """Memory of our own: that of shared mappings, which is the default of `mmap`, is in small pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def prune(folder: Path, max_bytes: int, keep: Path) -> None:
    """Remove those that were used longest ago until `max_bytes` are left, and what killed writers have left behind."""
    for changed, _, part in _files(folder, "*.part"):
        if changed < time.time() - STALE_S:
            part.unlink(missing_ok=True)
    found = _files(folder, f"*{SUFFIX}")
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total > max_bytes and path != keep:
            path.unlink(missing_ok=True)
            total -= size


def _files(folder: Path, pattern: str) -> list[tuple[float, int, Path]]:
    """Time of the last change, size and path of those that another process has not just removed, by age."""
    found = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    return sorted(found)


class StoringLoader:
    """Has each weight read, packed and written; what it returns holds no weights."""

    def __init__(self, loader: Loader, writer: Writer):
        self._loader = loader
        self._writer = writer

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._loader.tensor(name, shape, dtype)
        self._writer.tensor(name, tensor)
        return tensor

    def linear(
        self, name: str, parts: Sequence[WeightPart], in_features: int, bias: bool, tied: Tensor | None = None
    ) -> Linear:
        made = self._loader.linear(name, parts, in_features, bias, tied)
        assert isinstance(made, PackedLinear)
        self._writer.matrix(name, made.packed)
        return _nothing

    def finish(self, tied_embeddings: bool) -> None:
        self._loader.finish(tied_embeddings)


def _nothing(x: Tensor) -> Tensor:
    raise RuntimeError("this layer was only written to a file")


class StoredLoader:
    """Weights of a file that `StoringLoader` has filled from the same model."""

    def __init__(self, file: WeightFile, library: Library, context: ModelContext):
        self._file = file
        self._library = library
        self._context = context

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._file.tensor(name, shape, self._context.dtype if dtype is None else dtype)

    def linear(
        self, name: str, parts: Sequence[WeightPart], in_features: int, bias: bool, tied: Tensor | None = None
    ) -> Linear:
        matrix = self._file.matrix(name, sum(part.rows for part in parts), in_features, bias)
        return PackedLinear(matrix, self._library, self._context.dtype)

    def finish(self, tied_embeddings: bool) -> None:
        self._context.progress("weights", 1, 1)
