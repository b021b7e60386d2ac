"""Where weights are read from: one protocol, over safetensors (one file or shards, dense or quantized) and GGUF.

Pickled formats are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelFileError, near_matches
from core.model.block_formats import BlockFormat
from core.model.checkpoint_files import read_json
from core.model.dequant import dequantize
from core.model.gguf import GGUFFile
from core.model.gguf_weights import file_weights, read_hf_blocks, read_hf_tensor
from core.model.quantized.source import QuantizedWeights, scheme_of
from core.model.spec import ModelFiles, quantization_of

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A matrix as a GGUF file has it, still quantized."""

    data: Tensor  # uint8 [rows, row_bytes]; may be a view of the file, which is not to be written to
    block_format: BlockFormat

    def floats(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, columns]"""
        return dequantize(self.data, self.block_format, dtype)


class WeightSource(Protocol):
    """Tensors by their Hugging Face name. One is in memory at a time; nothing is kept."""

    @property
    def location(self) -> str:
        """The file or folder, for error messages."""
        ...

    def names(self) -> Set[str]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh CPU tensor of `dtype`, no view of the file. Raises ModelFileError naming file and tensor."""
        ...

    def blocks(self, name: str) -> BlockWeight | None:
        """The same tensor where it is quantized in blocks, as it is; None where it is not."""
        ...


def open_weights(files: ModelFiles) -> WeightSource:
    """The source that suits the model's kind. Raises ModelFileError."""
    if files.kind == "gguf":
        return GGUFWeights(files.path)
    if files.kind == "hf":
        folder = SafetensorsWeights(files.path)
        config = files.path / "config.json"
        quantized = quantization_of(read_json(config)) if config.is_file() else None
        if quantized is None:
            return folder
        return QuantizedWeights(folder, scheme_of(quantized, str(config)))
    raise ModelFileError(f"{files.path}: unknown kind of model files {files.kind!r} (gguf or hf)")


class GGUFWeights:
    """A GGUF file: dequantised, and the converter's reorderings undone."""

    def __init__(self, path: Path):
        self.location = str(path)
        self._file = GGUFFile.open(path)
        self._names = frozenset(file_weights(self._file))

    def names(self) -> Set[str]:
        return self._names

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return read_hf_tensor(self._file, name, dtype)

    def blocks(self, name: str) -> BlockWeight | None:
        data = read_hf_blocks(self._file, name)
        if data is None:
            return None
        return BlockWeight(data, self._file.info(file_weights(self._file)[name].name).block_format)


class SafetensorsWeights:
    """A folder with `model.safetensors`, or with shards and their index."""

    def __init__(self, folder: Path):
        self.location = str(folder)
        self._shard_of = _find_tensors(folder)
        self._open: dict[Path, Any] = {}  # safetensors ships no types for its handles

    def names(self) -> Set[str]:
        return self._shard_of.keys()

    def stored(self, name: str) -> Tensor:
        """A view of the mapped file, in the file's own dtype."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise ModelFileError(f"{self.location}: tensor {name}: not found{near_matches(name, self._shard_of)}")
        handle = self._open.get(shard)
        if handle is None:
            handle = self._open[shard] = _open_shard(shard)
        try:
            found: Tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise ModelFileError(f"{shard}: tensor {name}: {error}") from error
        return found

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self.stored(name)
        if not stored.is_floating_point():
            raise ModelFileError(
                f"{self._shard_of[name]}: tensor {name}: holds {stored.dtype}, not floating-point weights"
            )
        # The stored tensor is a view of the mapped file: without the copy, a file changed later would change the model.
        return stored.to(dtype, copy=True)

    def blocks(self, name: str) -> None:
        return None


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path}: not a readable safetensors file ({error})") from error


def _find_tensors(folder: Path) -> Mapping[str, Path]:
    """Tensor name -> file that holds it."""
    if (folder / SINGLE_FILE).exists():
        path = _checked_shard(folder, SINGLE_FILE)
        return MappingProxyType(dict.fromkeys(_open_shard(path).keys(), path))
    if not (folder / INDEX_FILE).exists():
        raise ModelFileError(
            f"{folder}: needs {SINGLE_FILE}, or shards with {INDEX_FILE}; pickled weights (.bin, .pt) are never loaded"
        )
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map: missing or empty")
    shards = {shard: _checked_shard(folder, shard) for shard in set(map(str, weight_map.values()))}
    return MappingProxyType({name: shards[str(shard)] for name, shard in weight_map.items()})


def _checked_shard(folder: Path, name: str) -> Path:
    """`name` may only be a plain file name that leads to a file of this model. Raises ModelFileError.

    A link may stay inside the folder, or lead into `blobs` of the Hugging Face cache that the folder is a snapshot of.
    """
    if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
        raise ModelFileError(f"{folder}: shard {name!r}: must be a plain *.safetensors file name")
    target, home = (folder / name).resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise ModelFileError(f"{folder}: shard {name!r}: links to a file outside the model's folder")
    if not target.is_file():
        raise ModelFileError(f"{folder}: shard {name!r}: no such file")
    return target
