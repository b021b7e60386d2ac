"""The GGUF reader agrees with the reference reader on good files and refuses bad ones by name (CVE-2025-0317 and kin)."""

from __future__ import annotations

import os
import random
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from core.errors import ModelFileError
from core.model.gguf import MAX_ARRAY_ITEMS, MAX_STRING_BYTES, GGUFFile
from core.model.spec import ModelFiles

DATA = Path(__file__).parents[1] / "data" / "gguf"
FILES = sorted(DATA.glob("*.gguf"))
TINY = DATA / "tiny-h128-Q4_0.gguf"


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str, value_type: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + payload


def tensor(name: str, dims: Sequence[int], type_id: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = bytes(64),
    version: int = 3,
    magic: bytes = b"GGUF",
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def write(folder: Path, content: bytes) -> Path:
    path = folder / "made.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_agrees_with_the_reference_reader(path: Path) -> None:
    ours, theirs = GGUFFile.open(path), GGUFReader(path)
    wanted = {key: found.contents() for key, found in theirs.fields.items() if not key.startswith("GGUF.")}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in ours.metadata.items()}
    assert found == wanted
    assert list(ours.tensors) == [entry.name for entry in theirs.tensors]
    for entry in theirs.tensors:
        info = ours.tensors[entry.name]
        assert info.shape == tuple(reversed([int(dim) for dim in entry.shape]))
        assert (info.type_id, info.offset, info.nbytes) == (entry.tensor_type, entry.data_offset, entry.n_bytes)
        assert ours.raw(entry.name).numpy().tobytes() == entry.data.tobytes()


def test_raw_outlives_the_file_object_and_read_is_a_copy() -> None:
    raw = GGUFFile.open(TINY).raw("output_norm.weight")
    copy = GGUFFile.open(TINY).read("output_norm.weight")
    assert raw.dtype == torch.uint8 and copy.shape == (128,)
    assert torch.equal(raw.clone().view(torch.float32), copy)
    copy.zero_()  # must not touch the mapping
    assert GGUFFile.open(TINY).read("output_norm.weight").abs().sum() > 0


def test_every_scalar_type(tmp_path: Path) -> None:
    layouts = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60_000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -(2**31))}
    layouts |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1)}
    keys = [key_value(f"k{kind}", kind, struct.pack(f"<{code}", value)) for kind, (code, value) in layouts.items()]
    keys.append(key_value("list", 9, struct.pack("<IQ3h", 3, 3, -1, 0, 1)))
    keys.append(key_value("texts", 9, struct.pack("<IQ", 8, 2) + text("é") + text("")))
    keys.append(key_value("none", 9, struct.pack("<IQ", 4, 0)))
    found = GGUFFile.open(write(tmp_path, gguf_bytes(keys, version=2))).metadata
    assert found == {f"k{kind}": value for kind, (_, value) in layouts.items()} | {
        "list": (-1, 0, 1),
        "texts": ("é", ""),
        "none": (),
    }


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(1024)
    values = np.arange(8, dtype=np.float32)
    for name in ("a", "b"):
        writer.add_tensor(name, values + ord(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.tensors["b"].offset % 1024 == 0
    assert torch.equal(file.read("b"), torch.arange(8.0) + ord("b"))


HUGE = 2**64 - 1
ALIGN = "general.alignment"
HEADER_CASES: dict[str, tuple[bytes, str]] = {
    "not gguf": (gguf_bytes(magic=b"GGML"), "magic"),
    "version 1": (gguf_bytes(version=1), "version"),
    "version 0": (gguf_bytes(version=0), "version"),
    "version 9": (gguf_bytes(version=9), "version"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "2^32 keys": (gguf_bytes(num_keys=2**32), "metadata_kv_count"),
    "2^64 keys": (gguf_bytes(num_keys=HUGE), "metadata_kv_count"),
    "keys past the end": (gguf_bytes(num_keys=1000), "metadata key"),
    "2^63 tensors": (gguf_bytes(num_tensors=2**63), "tensor_count"),
    "tensors past the end": (gguf_bytes(num_tensors=60_000), "tensor "),
    "key of 2^63 bytes": (gguf_bytes([struct.pack("<Q", 2**63)]), "metadata key 0 length"),
    "key not UTF-8": (gguf_bytes([text(b"\xff\xfe") + struct.pack("<IB", 0, 1)]), "UTF-8"),
    "key with a line break": (gguf_bytes([key_value("a\nb", 13, b"")]), r"'a\nb'"),
    "key twice": (gguf_bytes([key_value("k", 0, b"\1")] * 2), "metadata key 1 k: appears twice"),
    "value type": (gguf_bytes([key_value("k", 13, bytes(8))]), "k: value type 13"),
    "string past the end": (gguf_bytes([key_value("k", 8, struct.pack("<Q", 10_000))]), "k[0]"),
    "string of 2^64": (gguf_bytes([key_value("k", 8, struct.pack("<Q", HUGE))]), "k[0]"),
    "value not UTF-8": (gguf_bytes([key_value("k", 8, text(b"a\xff"))]), "UTF-8"),
    "array of 2^64": (gguf_bytes([key_value("k", 9, struct.pack("<IQ", 0, HUGE))]), "k length"),
    "array past the end": (gguf_bytes([key_value("k", 9, struct.pack("<IQ", 12, 1000))]), "k: needs 8000 bytes"),
    "strings past the end": (gguf_bytes([key_value("k", 9, struct.pack("<IQ", 8, 1000))]), "k: 1000 strings"),
    "array item type": (gguf_bytes([key_value("k", 9, struct.pack("<IQ", 77, 1))]), "k: value type 77"),
    "nested array": (gguf_bytes([key_value("k", 9, struct.pack("<IQ", 9, 1) + bytes(16))]), "arrays of arrays"),
    "alignment 0": (gguf_bytes([key_value(ALIGN, 4, struct.pack("<I", 0))]), ALIGN),
    "alignment 24": (gguf_bytes([key_value(ALIGN, 4, struct.pack("<I", 24))]), ALIGN),
    "alignment -32": (gguf_bytes([key_value(ALIGN, 5, struct.pack("<i", -32))]), ALIGN),
    "alignment 2^31": (gguf_bytes([key_value(ALIGN, 4, struct.pack("<I", 2**31))]), ALIGN),
    "alignment text": (gguf_bytes([key_value(ALIGN, 8, text("32"))]), ALIGN),
    "alignment float": (gguf_bytes([key_value(ALIGN, 6, struct.pack("<f", 32))]), ALIGN),
    "a shard": (gguf_bytes([key_value("split.count", 2, struct.pack("<H", 3))]), "split.count"),
    "no dims": (gguf_bytes(tensors=[tensor("t", [])]), "tensor t dimensions"),
    "2^32 dims": (gguf_bytes(tensors=[tensor("t", [4], num_dims=2**32 - 1)]), "tensor t dimensions"),
    "empty dim": (gguf_bytes(tensors=[tensor("t", [4, 0])]), "tensor t shape"),
    "dims overflow": (gguf_bytes(tensors=[tensor("t", [2**32, 2**32, 2])]), "tensor t offset"),
    "dims wrap to 16": (gguf_bytes(tensors=[tensor("t", [2**62 + 4, 4])]), "tensor t offset"),
    "tensor type": (gguf_bytes(tensors=[tensor("t", [4], 200)]), "tensor t type: ggml type 200"),
    "removed type": (gguf_bytes(tensors=[tensor("t", [32], 4)]), "tensor t type: ggml type 4"),
    "part of a block": (gguf_bytes(tensors=[tensor("t", [33], 2)]), "tensor t shape"),
    "offset past the end": (gguf_bytes(tensors=[tensor("t", [4], offset=2**40)]), "tensor t offset"),
    "offset wraps": (gguf_bytes(tensors=[tensor("t", [4], offset=2**64 - 32)]), "tensor t offset"),
    "offset not aligned": (gguf_bytes(tensors=[tensor("t", [4], offset=8)]), "tensor t offset"),
    "data cut off": (gguf_bytes(tensors=[tensor("t", [17])]), "tensor t offset"),
    "overlap": (gguf_bytes(tensors=[tensor("t", [16]), tensor("u", [8], offset=32)]), "tensor u offset"),
    "tensor twice": (gguf_bytes(tensors=[tensor("t", [8]), tensor("t", [8], offset=32)]), "tensor t: appears twice"),
    "name of 2^32 bytes": (gguf_bytes(tensors=[struct.pack("<Q", 2**32)]), "tensor name 0 length"),
}


@pytest.mark.parametrize("case", HEADER_CASES)
def test_bad_header_names_file_and_field(tmp_path: Path, case: str) -> None:
    content, field = HEADER_CASES[case]
    path = write(tmp_path, content)
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert field in str(caught.value)


def test_the_builder_of_these_cases_makes_good_files(tmp_path: Path) -> None:
    file = GGUFFile.open(write(tmp_path, gguf_bytes([key_value("k", 0, b"\1")], [tensor("t", [4, 4])])))
    assert file.metadata == {"k": 1} and file.tensors["t"].shape == (4, 4)


def test_missing_empty_and_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for path, reason in ((tmp_path / "none.gguf", "cannot be opened"), (tmp_path / "empty.gguf", "empty")):
        with pytest.raises(ModelFileError, match=reason):
            GGUFFile.open(path)
    with pytest.raises(ModelFileError, match="cannot be opened"):
        GGUFFile.open(tmp_path)


def test_truncation_at_any_place_is_refused(tmp_path: Path) -> None:
    whole = TINY.read_bytes()
    places = [*range(1, 400, 7), *range(400, len(whole), 9_973), len(whole) - 1]
    for place in places:
        with pytest.raises(ModelFileError, match="made.gguf"):
            GGUFFile.open(write(tmp_path, whole[:place]))


def test_limits_bound_what_a_large_file_can_ask_for(tmp_path: Path) -> None:
    bytes_array = key_value("k", 9, struct.pack("<IQ", 0, MAX_ARRAY_ITEMS + 1) + bytes(MAX_ARRAY_ITEMS + 1))
    with pytest.raises(ModelFileError, match="k length"):
        GGUFFile.open(write(tmp_path, gguf_bytes([bytes_array])))
    long_text = key_value("k", 8, text(b"x" * (MAX_STRING_BYTES + 1)))
    with pytest.raises(ModelFileError, match=r"k\[0\]"):
        GGUFFile.open(write(tmp_path, gguf_bytes([long_text])))


def mutations(head: bytes, count: int) -> list[bytes]:
    """Seeded: flipped bytes, 32- and 64-bit extremes, and runs of one value, within the first 4 KB."""
    source = random.Random(20250317)
    extremes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    made = []
    for number in range(count):
        changed = bytearray(head)
        # Half of the changes hit the fixed fields and the first keys, where sizes lie close together.
        place = source.randrange(4, 256 if number % 2 else len(head) - 8)
        kind = source.randrange(3)
        if kind == 0:
            changed[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            width = source.choice((4, 8))
            value = source.choice(extremes) % 2 ** (8 * width)
            changed[place : place + width] = value.to_bytes(width, "little")
        else:
            changed[place : place + 8] = bytes([source.randrange(256)]) * 8
        made.append(bytes(changed))
    return made


def open_or_refuse(path: Path) -> bool:
    """True when refused. Anything but a good file or a ModelFileError fails the test."""
    try:
        file = GGUFFile.open(path)
        for info in file.tensors.values():
            assert info.offset + info.nbytes <= path.stat().st_size
        refused = False
    except ModelFileError as error:
        assert str(path) in str(error)
        refused = True
    return refused


def test_mutated_headers_never_crash_or_use_much_memory(tmp_path: Path) -> None:
    whole = TINY.read_bytes()
    refused = 0
    tracemalloc.start()
    try:
        for head in mutations(whole[:4096], 400):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refused += open_or_refuse(write(tmp_path, head + whole[4096:]))
            assert tracemalloc.get_traced_memory()[1] - before < 200 * 2**20
    finally:
        tracemalloc.stop()
    assert refused > 100


@pytest.mark.model
def test_mutated_headers_of_a_real_model(smollm2: ModelFiles, tmp_path: Path) -> None:
    model = smollm2.path
    path = tmp_path / "mutated.gguf"
    with model.open("rb") as source:
        path.write_bytes(source.read(1 << 22))  # the header, and a hole in place of the weights
    os.truncate(path, model.stat().st_size)
    head = path.read_bytes()[:4096]
    refused = 0
    for changed in mutations(head, 200):
        with path.open("r+b") as file:
            file.write(changed)
        refused += open_or_refuse(path)
    assert refused > 40


def test_unsupported_type_names_type_and_tensor(tmp_path: Path) -> None:
    file = GGUFFile.open(write(tmp_path, gguf_bytes(tensors=[tensor("blk.0.x", [32], 20)])))
    assert file.raw("blk.0.x").shape == (18,)
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.x: type IQ4_NL is not supported \(supported: BF16, F16"):
        file.read("blk.0.x")


def test_missing_tensor_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"tiny-h128-Q4_0\.gguf: tensor nope: is missing"):
        GGUFFile.open(TINY).read("nope")


def test_a_large_vocabulary_parses_without_per_item_overhead(tmp_path: Path) -> None:
    """262,144 tokens with scores and types: counts Python calls, which do not depend on the machine's speed."""
    count = 262_144
    tokens = struct.pack("<IQ", 8, count) + b"".join(text(f"▁t{number}") for number in range(count))
    scores = struct.pack(f"<IQ{count}f", 6, count, *([-1.0] * count))
    path = write(tmp_path, gguf_bytes([key_value("tokens", 9, tokens), key_value("scores", 9, scores)]))
    calls = 0

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        metadata = GGUFFile.open(path).metadata
    finally:
        sys.setprofile(None)
    found = metadata["tokens"]
    assert isinstance(found, tuple) and len(found) == count and found[-1] == "▁t262143"
    assert calls < 2_000
