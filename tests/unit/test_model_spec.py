"""Model files -> ModelSpec. Broken files give an error that names file and field; nothing of the model is run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.errors import ConfigError, ModelFileError
from core.model.describe import read_spec
from core.model.spec import ModelFiles

DATA = Path(__file__).parents[1] / "data/gguf"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "merges": []},
    "added_tokens": [{"id": 5, "content": "<|im_end|>", "special": True}],
}


def write(folder: Path, **files: Any) -> ModelFiles:
    """A small but complete folder; `files` replaces JSON files by name (None removes)."""
    contents = {"config": CONFIG, "tokenizer": TOKENIZER} | files
    for name, value in contents.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    save_file({"w": torch.zeros(4, 4)}, folder / "model.safetensors")
    return ModelFiles("hf", folder, str(folder))


def test_folder(tmp_path: Path) -> None:
    spec = read_spec(
        write(
            tmp_path,
            generation_config={"eos_token_id": [1, 3], "temperature": 0.7},
            tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "pad_token": "a"},
        )
    )
    assert (spec.model_type, spec.vocab_size, spec.max_model_len) == ("llama", 8, 64)
    assert spec.eos_token_ids == {1, 3, 5}
    assert (spec.bos_token_id, spec.pad_token_id) == (0, 2)
    assert spec.unusable_token_ids == {4, 6, 7}  # rows without a token; 5 is an added one
    assert spec.generation_config["temperature"] == 0.7
    assert spec.name == tmp_path.name and spec.config == CONFIG


def test_unigram_vocabularies_count_by_position(tmp_path: Path) -> None:
    unigram = {"model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["</s>", 0.0], ["a", -1.5]]}}
    spec = read_spec(write(tmp_path, tokenizer=unigram, tokenizer_config={"eos_token": "a"}))
    assert spec.unusable_token_ids == {3, 4, 5, 6, 7} and spec.eos_token_ids == {1, 2}


def test_without_a_tokenizer_all_rows_count(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, tokenizer=None)).unusable_token_ids == frozenset()


def test_text_model_inside_a_multimodal_config(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "eos_token_id": [1, 3], "text_config": {**CONFIG, "eos_token_id": None}}
    spec = read_spec(write(tmp_path, config=nested))
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (8, 64, {1, 3})


def test_max_model_len_goes_down_but_not_up(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert read_spec(files, max_model_len=32).max_model_len == 32
    with pytest.raises(ConfigError, match=r"max_model_len: 65 is more than the model's 64"):
        read_spec(files, max_model_len=65)
    with pytest.raises(ConfigError, match="not above zero"):
        read_spec(files, max_model_len=0)


def test_a_config_without_length_asks_for_one(tmp_path: Path) -> None:
    files = write(tmp_path, config={**CONFIG, "max_position_embeddings": None})
    with pytest.raises(
        ConfigError, match=r"config\.json: max_position_embeddings is missing; set model\.max_model_len"
    ):
        read_spec(files)
    assert read_spec(files, max_model_len=2048).max_model_len == 2048


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_extends_the_trained_length(key: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_spec(write(tmp_path, config={**CONFIG, key: yarn})).max_model_len == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, r"config\.json: vocab_size: is missing"),
        ({"vocab_size": "8"}, r"config\.json: vocab_size: should be an integer, is str"),
        ({"vocab_size": 0}, r"config\.json: vocab_size: 0 is not from 1"),
        ({"vocab_size": 1 << 40}, r"config\.json: vocab_size: .* is not from 1"),
        ({"vocab_size": True}, r"config\.json: vocab_size: should be an integer"),
        ({"max_position_embeddings": -5}, r"config\.json: max_position_embeddings: -5"),
        ({"eos_token_id": 8}, r"config\.json: eos_token_id: 8 is not a token id below vocab_size 8"),
        ({"eos_token_id": ["1"]}, r"config\.json: eos_token_id: '1'"),
        ({"model_type": None}, r"config\.json: model_type: is missing"),
        ({"model_type": ["llama"]}, r"config\.json: model_type: is missing or not a string"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_spec(write(tmp_path, config={**CONFIG, **changes}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"vocab_size": NaN}', "\x00\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_broken_json_is_named(name: str, text: str, tmp_path: Path) -> None:
    files = write(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        read_spec(files)


def test_truncated_weights_are_found_before_loading(tmp_path: Path) -> None:
    files = write(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        with pytest.raises(ModelFileError, match=r"model\.safetensors.*(truncated|not a safetensors)"):
            read_spec(files)
    path.write_bytes(data + b"tail")
    with pytest.raises(ModelFileError, match="its header describes"):
        read_spec(files)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "absent.safetensors"}, r"absent\.safetensors: named in .* but missing"),
        ({"w": "../model.safetensors"}, "not the name of a .safetensors file in the folder"),
        ({"w": "weights.bin"}, "not the name of a .safetensors file in the folder"),
        ({}, "weight_map: is missing or empty"),
    ],
)
def test_sharded_indexes_are_checked(weight_map: dict[str, str], message: str, tmp_path: Path) -> None:
    files = write(tmp_path, **{"model.safetensors.index": {"weight_map": weight_map}})
    with pytest.raises(ModelFileError, match=message):
        read_spec(files)


def test_code_of_the_repository_is_ignored_or_refused_never_run(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert read_spec(write(tmp_path, config={**CONFIG, **code})).model_type == "llama"
    unknown = write(tmp_path, config={**CONFIG, **code, "model_type": "evil"})
    with pytest.raises(ModelFileError, match=r"config\.json: model_type: 'evil' needs the code"):
        read_spec(unknown)
    assert read_spec(unknown, known_model_types=("evil",)).model_type == "evil"
    assert not (tmp_path / "ran").exists()


def test_describing_a_folder_does_not_load_torch(tmp_path: Path) -> None:
    write(tmp_path)
    code = (
        "import sys; from pathlib import Path; from core.model.sources import resolve\n"
        "from core.model.describe import read_spec\n"
        f"files = resolve({str(tmp_path)!r}, cache_dir=Path('.'), progress=print)\n"
        "read_spec(files); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=DATA.parents[2])
    assert done.stdout.split() == ["False", "False"]


def test_gguf() -> None:
    path = DATA / "tiny-h128-Q4_0.gguf"
    spec = read_spec(ModelFiles("gguf", path, str(path)))
    assert (spec.model_type, spec.name) == ("llama", "tiny-h128-Q4_0")
    assert (spec.vocab_size, spec.max_model_len) == (512, 256)
    assert spec.eos_token_ids == {2} and spec.bos_token_id == 1
    with pytest.raises(ConfigError, match="more than the model's 256"):
        read_spec(spec.files, max_model_len=257)


def test_broken_gguf_names_file_and_field(tmp_path: Path) -> None:
    data = (DATA / "tiny-h128-Q4_0.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for cut in (0, 3, 20, 2000, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: \w+"):
            read_spec(ModelFiles("gguf", path, str(path)))


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'onnx' is unknown"):
        read_spec(replace(write(tmp_path), kind="onnx"))


def test_a_process_that_builds_no_model_leaves_the_check_of_the_type_to_the_one_that_does(tmp_path: Path) -> None:
    folder = write(tmp_path, config={**CONFIG, "auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"})
    code = (
        "import sys; from core.model.describe import ANY_MODEL_TYPE, read_spec; from core.model.spec import ModelFiles\n"
        "from pathlib import Path\n"
        f"path = Path({str(tmp_path)!r})\n"
        "print(read_spec(ModelFiles('hf', path, str(path)), known_model_types=ANY_MODEL_TYPE).model_type)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=DATA.parents[2])
    assert done.stdout.split() == ["evil", "False", "False"]
    with pytest.raises(ModelFileError, match="needs the code"):
        read_spec(folder)


@pytest.mark.parametrize("source", ["hf:org/Tiny-1B", "hf:org/Tiny-1B@main", "hf:Tiny-1B"])
def test_a_snapshot_of_the_hub_is_called_by_its_repository(tmp_path: Path, source: str) -> None:
    files = write(tmp_path)
    assert read_spec(ModelFiles("hf", files.path, source)).name == "Tiny-1B"
    assert read_spec(files).name == tmp_path.name
