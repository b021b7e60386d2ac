"""A GGUF file gives the config and the weights that the model's Hugging Face checkpoint would (bugs O1)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.errors import ModelFileError
from core.model.gguf import GGUFFile, TensorInfo
from core.model.gguf_config import hf_config, llama3_factors, read_hf_config
from core.model.gguf_weights import file_weights, read_hf_tensor, unpermute_rows, weight_map
from core.testing.harness.transformers_equality import assert_equals_transformers

DATA = Path(__file__).parents[1] / "data" / "gguf"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text())
TINY = DATA / "tiny-h128-Q4_0.gguf"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def metadata(arch: str, **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "block_count": 12,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 100,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items() if v is not None}


def info(*shape: int) -> TensorInfo:
    return TensorInfo("any", shape, 0, 0, 4)


def transformers_model(path: Path, folder: Path) -> Any:
    """The same file through transformers' own GGUF loader."""
    import transformers

    (folder / "m.gguf").symlink_to(path)
    options = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", dtype=torch.float32, **options)


@pytest.mark.parametrize("name", ["tiny-h128-Q4_0.gguf", "tiny-h256-Q4_K_M.gguf"])
def test_weights_equal_transformers_loader(name: str, tmp_path: Path) -> None:
    assert_equals_transformers(GGUFFile.open(DATA / name), transformers_model(DATA / name, tmp_path))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_logits_of_the_rebuilt_model(name: str) -> None:
    """Config and weights together: rows left in RoPE pair order would give other logits."""
    file = GGUFFile.open(DATA / name)
    model = LlamaForCausalLM(LlamaConfig(**read_hf_config(file))).eval()
    weights = {key: read_hf_tensor(file, key) for key in file_weights(file)}
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(torch.tensor([EXPECTED[name]["prompt_ids"]])).logits[0]
    assert logits.argmax(-1).tolist() == EXPECTED[name]["argmax"]
    assert torch.allclose(logits[-1, :64], torch.tensor(EXPECTED[name]["last_logits"]), atol=2e-4)


def test_unpermute_undoes_the_interleaving() -> None:
    """Two heads of four rows: the file holds (0, 2, 1, 3) of each, pairs side by side."""
    halves = torch.arange(8.0).view(8, 1)
    stored = halves[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert torch.equal(unpermute_rows(stored, 2), halves)
    assert torch.equal(unpermute_rows(stored.view(8), 2), halves.view(8))


@pytest.fixture
def gemma_file(tmp_path: Path) -> GGUFFile:
    """A one-layer gemma3 file whose tensors hold their own index."""
    writer = GGUFWriter(tmp_path / "gemma.gguf", "gemma3")
    for key, value in metadata("gemma3", block_count=1, attention__sliding_window=8).items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    for index, weight in enumerate(weight_map("gemma3_text", 1).values()):
        if not weight.optional:
            writer.add_tensor(weight.name, np.full((2, 4), 1 + index, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(tmp_path / "gemma.gguf")


def test_gemma_norms_lose_the_one_and_other_weights_do_not(gemma_file: GGUFFile) -> None:
    names = [name for name, weight in weight_map("gemma3_text", 1).items() if not weight.optional]
    assert sum("norm" in name for name in names) == 7
    for index, name in enumerate(names):
        wanted = index if "norm" in name else 1 + index
        value = read_hf_tensor(gemma_file, name, torch.bfloat16)
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, torch.full((2, 4), wanted, dtype=torch.bfloat16))


def test_tied_file_reads_its_embedding_as_lm_head(gemma_file: GGUFFile) -> None:
    assert read_hf_config(gemma_file)["tie_word_embeddings"] is True
    head, embedding = (read_hf_tensor(gemma_file, name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(head, embedding)
    untied = GGUFFile.open(TINY)
    assert read_hf_config(untied)["tie_word_embeddings"] is False
    assert not torch.equal(
        read_hf_tensor(untied, "lm_head.weight"), read_hf_tensor(untied, "model.embed_tokens.weight")
    )


def test_unknown_tensor_is_named_with_near_matches() -> None:
    with pytest.raises(ModelFileError, match=r"model\.layers\.0\.self_attn\.q_prj\.weight.*did you mean"):
        read_hf_tensor(GGUFFile.open(TINY), "model.layers.0.self_attn.q_prj.weight")
    with pytest.raises(ModelFileError, match="gpt_neox has no GGUF weight map"):
        weight_map("gpt_neox", 2)


def test_head_count_that_does_not_divide_the_rows(tmp_path: Path) -> None:
    content = TINY.read_bytes()
    key = b"llama.attention.head_count"
    at = content.index(key + b"\x04\0\0\0") + len(key) + 4
    path = tmp_path / "heads.gguf"
    path.write_bytes(content[:at] + (6).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelFileError, match=r"attn_q\.weight: 128 rows do not divide into 6 heads"):
        read_hf_tensor(GGUFFile.open(path), "model.layers.0.self_attn.q_proj.weight")


def test_config_of_llama() -> None:
    config = hf_config(metadata("llama", rope__freq_base=5e5), {"output.weight": info(100, 64)})
    wanted = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "tie_word_embeddings": False,
        "sliding_window": None,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    assert {key: config[key] for key in wanted} == wanted


def test_config_of_mistral_and_qwen() -> None:
    mistral = hf_config(metadata("llama", attention__sliding_window=1024), {})
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 1024)
    assert set(mistral["layer_types"]) == {"sliding_attention"}
    qwen2 = hf_config(metadata("qwen2"), {"blk.0.attn_q.bias": info(64), "token_embd.weight": info(104, 64)})
    assert (qwen2["model_type"], qwen2["attention_bias"], qwen2["vocab_size"]) == ("qwen2", True, 104)
    qwen3 = hf_config(metadata("qwen3", attention__key_length=128, attention__value_length=128), {})
    assert (qwen3["model_type"], qwen3["head_dim"]) == ("qwen3", 128)
    assert "model.layers.3.self_attn.q_norm.weight" in weight_map("qwen3", 4)


def test_config_of_gemma() -> None:
    gemma2 = hf_config(metadata("gemma2"), {})
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    assert (gemma2["sliding_window"], gemma2["query_pre_attn_scalar"]) == (4096, 16)
    assert gemma2["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    gemma3 = hf_config(
        metadata(
            "gemma3",
            attention__sliding_window=512,
            rope__freq_base=1e6,
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
        ),
        {},
    )
    assert [kind == "full_attention" for kind in gemma3["layer_types"]] == [False] * 5 + [True] + [False] * 5 + [True]
    assert gemma3["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    assert gemma3["attn_logit_softcapping"] is None and gemma3["hidden_activation"] == "gelu_pytorch_tanh"
    deep = hf_config(metadata("gemma3", block_count=62, attention__key_length=32), {})
    assert deep["query_pre_attn_scalar"] == 16


def test_sliding_pattern_of_the_file_wins() -> None:
    window = {"attention__sliding_window": 8}
    period = hf_config(metadata("gemma3", block_count=4, attention__sliding_window_pattern=2, **window), {})
    flags = (True, False, False, True)
    listed = hf_config(metadata("gemma3", block_count=4, attention__sliding_window_pattern=flags, **window), {})
    assert [kind == "sliding_attention" for kind in period["layer_types"]] == [True, False, True, False]
    assert [kind == "sliding_attention" for kind in listed["layer_types"]] == list(flags)


def test_yarn() -> None:
    changes = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32768,
    }
    config = hf_config(metadata("qwen3", **changes), {})
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config["rope_scaling"] == wanted
    assert config["rope_parameters"] == {"rope_theta": 10_000.0, **wanted}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def test_llama3_factors_equal_transformers() -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        rope_parameters={"rope_theta": 5e5, **LLAMA3},
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    assert torch.allclose(plain / torch.tensor(llama3_factors(128, 5e5, LLAMA3)), scaled, rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    scaling = LLAMA3 | {"factor": factor}
    file = file_with_rope_factors(tmp_path, np.array(llama3_factors(16, 5e5, scaling), np.float32))
    config = read_hf_config(file)
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {"rope_theta": 5e5, **scaling}


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 9, 8),  # finite, of another scaling
        np.ones(4),  # too few
        np.full(8, np.inf),
        np.full(8, np.nan),
        np.zeros(8),
        -np.ones(8),
    ],
)
def test_other_rope_factors_are_refused(tmp_path: Path, factors: Any) -> None:
    file = file_with_rope_factors(tmp_path, factors.astype(np.float32))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight: holds RoPE factors that are not Llama 3's"):
        read_hf_config(file)


@pytest.mark.parametrize("factors", [np.ones(8, np.float16), np.ones(70_000, np.float32)])
def test_rope_factors_of_another_type_or_size_are_refused_unread(tmp_path: Path, factors: Any) -> None:
    file = file_with_rope_factors(tmp_path, factors)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight: is F(16|32) of shape .*, not F32 of at most 65536"):
        read_hf_config(file)


def file_with_rope_factors(folder: Path, factors: Any) -> GGUFFile:
    writer = GGUFWriter(folder / "rope.gguf", "llama")
    for key, value in metadata("llama", rope__freq_base=5e5).items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile.open(folder / "rope.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama.block_count: is missing"),
        ({"block_count": "12"}, "llama.block_count: should be an integer, is str"),
        ({"block_count": 0}, "llama.block_count: 0 is not from 1"),
        ({"embedding_length": 64.0}, "llama.embedding_length: should be an integer, is float"),
        ({"attention__head_count": 0}, "llama.attention.head_count: 0 is not from 1"),
        ({"attention__head_count": True}, "llama.attention.head_count: should be an integer, is bool"),
        ({"attention__head_count_kv": 3}, "llama.attention.head_count_kv: 3 does not divide"),
        ({"attention__head_count_kv": (2, 1)}, "llama.attention.head_count_kv: differs between layers"),
        ({"attention__value_length": 8}, "llama.attention.value_length: 8 differs"),
        ({"attention__layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon: should be a number, is str"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon: nan is not a finite number"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count: 8 of 16: partial RoPE"),
        ({"rope__freq_base": 0.0}, "llama.rope.freq_base: 0.0 is not a finite number above zero"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type: longrope is not supported"),
        ({"rope__scaling__type": "linear"}, "llama.rope.scaling.factor: is missing"),
        ({"expert_count": 8}, "llama.expert_count: mixture-of-experts"),
        ({"context_length": -1}, "llama.context_length: -1 is not from 1"),
    ],
)
def test_bad_metadata_names_file_and_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        hf_config(metadata("llama", **changes), {}, source="some.gguf")
    assert str(caught.value).startswith("some.gguf: ")
    assert message in str(caught.value)


def test_unsupported_architecture_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"general\.architecture: lama is not supported; did you mean llama"):
        hf_config(metadata("lama"), {})


def test_uniform_head_array_is_accepted() -> None:
    config = hf_config(metadata("llama", attention__head_count_kv=(2,) * 12), {})
    assert config["num_key_value_heads"] == 2


def test_fixture_is_copied_not_shared(tmp_path: Path) -> None:
    """Reading never writes: the file is byte for byte the same afterwards."""
    copy = shutil.copy(TINY, tmp_path / "copy.gguf")
    file = GGUFFile.open(copy)
    for name in file_weights(file):
        read_hf_tensor(file, name).zero_()
    assert Path(copy).read_bytes() == TINY.read_bytes()
