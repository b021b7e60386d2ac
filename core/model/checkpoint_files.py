"""Headers and JSON of a Hugging Face folder, checked before anything is loaded. Torch-free."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ModelFileError

MAX_JSON_BYTES = 1 << 28
MAX_SAFETENSORS_HEADER = 100 << 20  # the format's own limit


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFileError naming the file and, where there is one, the position."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: not a JSON object ({error}); fetch the file again") from error


def check_safetensors(folder: Path) -> None:
    """Headers and sizes of every shard: a truncated or foreign file is found here and not in the middle of loading.

    Raises ModelFileError naming the file.
    """
    for path in _shards(folder):
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise ModelFileError(f"{path}: named in model.safetensors.index.json but missing; fetch the model again")
        needed = _safetensors_size(path, size)
        if needed != size:
            raise ModelFileError(
                f"{path}: has {size} bytes, its header describes {needed} (truncated?); fetch it again"
            )


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        yield from sorted(folder.glob("*.safetensors"))
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map: is missing or empty")
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index}: weight_map: {name!r} is not the name of a .safetensors file in the folder")
        yield folder / name


class _TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _safetensors_size(path: Path, size: int) -> int:
    """Bytes the file should have: 8, the header, the end of the last tensor."""
    try:
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(MAX_SAFETENSORS_HEADER, size - 8):
                raise ModelFileError(f"{path}: header: {length} bytes pass the end of the file (truncated?)")
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        ends = [msgspec.json.decode(raw, type=_TensorEntry).data_offsets[1] for raw in header.values()]
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: header: {error}; not a safetensors file") from error
    return int(8 + length + max(ends, default=0))
