"""Weight sources and the loader: safetensors in one file and in shards, what is refused, and GGUF under the same names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ModelFileError
from core.model.interface import AttentionBackend, Linear, ModelContext
from core.model.loader import WeightLoader, WeightPart
from core.model.spec import ModelFiles, ModelSpec
from core.model.weights import SafetensorsWeights, open_weights

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.bias": torch.tensor([1.0, 2.0]),
    "b.weight": torch.arange(3.0).view(1, 3) + 10,
    "b.bias": torch.tensor([3.0]),
    "norm.weight": torch.tensor([0.1, 0.2, 0.3]),
}


def write_shards(folder: Path, second: str = "x-2.safetensors") -> None:
    """Two shards; the index calls the second one `second`."""
    names = sorted(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, folder / "x-1.safetensors")
    save_file({name: TENSORS[name] for name in names[2:]}, folder / "x-2.safetensors")
    weight_map = dict.fromkeys(names[:2], "x-1.safetensors") | dict.fromkeys(names[2:], second)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(params=["single", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "single":
        save_file(TENSORS, tmp_path / "model.safetensors")
    else:
        write_shards(tmp_path)
    return tmp_path


def test_reads_every_tensor_in_the_asked_dtype(folder: Path) -> None:
    source = open_weights(ModelFiles("hf", folder, "x"))
    assert set(source.names()) == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name, torch.float32), tensor)
        half = source.read(name, torch.bfloat16)
        assert half.dtype == torch.bfloat16 and torch.equal(half, tensor.bfloat16())


def test_a_tensor_read_does_not_change_with_the_file(folder: Path) -> None:
    tensor = SafetensorsWeights(folder).read("a.weight", torch.float32)
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as stream:
            stream.seek(path.stat().st_size - 100)
            stream.write(b"\xff" * 100)
    assert torch.equal(tensor, TENSORS["a.weight"])


def test_missing_tensor_names_file_and_near_names(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor a.weigth: not found; did you mean a.weight"):
        SafetensorsWeights(folder).read("a.weigth", torch.float32)


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="q: holds torch.int32"):
        SafetensorsWeights(tmp_path).read("q", torch.float32)


@pytest.mark.parametrize(
    "shard",
    ["../x-2.safetensors", "/x-2.safetensors", "sub/x-2.safetensors", "x-2.bin", "..", "a\\x-2.safetensors"],
)
def test_shard_names_that_leave_the_folder_or_format(shard: str, tmp_path: Path) -> None:
    write_shards(tmp_path, shard)
    with pytest.raises(ModelFileError, match="must be a plain"):
        SafetensorsWeights(tmp_path)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(ModelFileError, match="links to a file outside"):
        SafetensorsWeights(folder)
    write_shards(folder)
    (folder / "model.safetensors").unlink()
    (folder / "x-1.safetensors").unlink()
    (folder / "x-1.safetensors").symlink_to(outside)
    with pytest.raises(ModelFileError, match=r"x-1.safetensors.*links to a file outside"):
        SafetensorsWeights(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(SafetensorsWeights(snapshot).read("a.bias", torch.float32), TENSORS["a.bias"])


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFileError, match=r"pickled weights \(.bin, .pt\) are never loaded"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\x00\x00\x00\x00\x00\x00\x00{not json}......"])
def test_damaged_file_names_itself(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model.safetensors: not a readable safetensors file"):
        SafetensorsWeights(tmp_path)


def test_index_without_map_and_missing_shard(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelFileError, match="weight_map: missing or empty"):
        SafetensorsWeights(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelFileError, match="'gone.safetensors': no such file"):
        SafetensorsWeights(tmp_path)


class _Recorder:
    """A quant method that keeps what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[Tensor, Tensor | None]] = {}

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        self.given[name] = (weight, bias)
        return lambda x: x


class _NoAttention:
    pass


def loader(folder: Path, quant: _Recorder, dtype: torch.dtype = torch.float32) -> WeightLoader:
    spec = ModelSpec("x", ModelFiles("hf", folder, "x"), {}, 1, 1, frozenset())
    attention: AttentionBackend = _NoAttention()  # type: ignore[assignment]
    context = ModelContext(spec, torch.device("cpu"), dtype, attention, quant, lambda what, done, total: None)
    return WeightLoader(SafetensorsWeights(folder), context)


def test_parts_are_merged_in_order(folder: Path) -> None:
    quant = _Recorder()
    loader(folder, quant).linear("ab", (WeightPart("a", 2), WeightPart("b", 1)), 3, bias=True)
    weight, bias = quant.given["ab"]
    assert torch.equal(weight, torch.cat((TENSORS["a.weight"], TENSORS["b.weight"])))
    assert bias is not None and bias.tolist() == [1.0, 2.0, 3.0]


def test_wrong_shape_names_tensor_and_both_shapes(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor a.weight: shape \[2, 3\], the config asks for \[4, 3\]"):
        loader(folder, _Recorder()).linear("a", (WeightPart("a", 4),), 3, bias=False)


def test_tensors_without_a_place_are_refused(folder: Path) -> None:
    reader = loader(folder, _Recorder())
    reader.linear("ab", (WeightPart("a", 2), WeightPart("b", 1)), 3, bias=False)
    with pytest.raises(ModelFileError, match=r"3 tensors have no place .*\(a.bias, b.bias, norm.weight\)"):
        reader.finish(tied_embeddings=False)
    for name in ("a.bias", "b.bias", "norm.weight"):
        reader.tensor(name, tuple(TENSORS[name].shape))
    reader.finish(tied_embeddings=False)


def test_progress_counts_to_the_end(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    spec = ModelSpec("x", ModelFiles("hf", folder, "x"), {}, 1, 1, frozenset())
    attention: AttentionBackend = _NoAttention()  # type: ignore[assignment]
    context = ModelContext(
        spec, torch.device("cpu"), torch.float32, attention, _Recorder(), lambda *update: seen.append(update)
    )
    reader = WeightLoader(SafetensorsWeights(folder), context)
    for name, tensor in TENSORS.items():
        reader.tensor(name, tuple(tensor.shape))
    assert seen == [("weights", done, 5) for done in range(1, 6)]


def test_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="unknown kind of model files 'onnx'"):
        open_weights(ModelFiles("onnx", tmp_path, "x"))
