"""The native model against transformers: float32 logits of every family and RoPE scaling, on tiny random models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.model.decoder import NativeModel
from core.model.describe import read_spec
from core.model.interface import AttentionContext, ModelContext, QuantContext
from core.model.model_settings import NativeSettings
from core.model.spec import ModelFiles, ModelSpec
from core.testing.batches import Share, batch_of
from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TorchSdpa
from plugins.quant.none import Dense
from plugins.quant.settings import DenseSettings

CPU = torch.device("cpu")
BLOCK = 16
WINDOW = 12  # shorter than the prompt and no multiple of the block
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # large enough that a wrong detail moves the logits
}
GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    config_class: str
    values: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        torch.manual_seed(0)
        return getattr(transformers, self.config_class)(**{**BASE, **self.values})


def rope(parameters: dict[str, Any]) -> Case:
    return Case("LlamaConfig", {"rope_parameters": {"rope_theta": 500.0, **parameters}})


CASES = {
    "llama": Case("LlamaConfig"),
    "llama_tied_biased": Case("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_one_head_per_kv": Case("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama_gelu": Case("LlamaConfig", {"hidden_act": "gelu"}),
    "linear": rope({"rope_type": "linear", "factor": 2.5}),
    "llama3": rope(LLAMA3),
    "yarn": rope(YARN),
    "yarn_all_keys": rope({**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn_attention_factor": rope({**YARN, "attention_factor": 1.25, "truncate": False}),
    "mistral": Case("MistralConfig", {"sliding_window": WINDOW}),
    "mistral_full": Case("MistralConfig", {"sliding_window": None}),
    "qwen2": Case("Qwen2Config"),
    "qwen2_window": Case("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Case("Qwen3Config", {"head_dim": 32}),
    "qwen3_biased": Case("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": Case("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma2_no_caps": Case("Gemma2Config", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": Case("Gemma3TextConfig", {**GEMMA, "_sliding_window_pattern": 3}),
    "gemma3_scaled": Case(
        "Gemma3TextConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


def randomize(model: Any) -> None:
    """Norm weights and biases start as constants; random ones show a norm or bias that is left out."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                center = 0.0 if name.endswith("bias") or "gemma" in model.config.model_type else 1.0
                parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))


def save(case: Case, folder: Path) -> Any:
    """A random model of this case in `folder`, and the reference that wrote it."""
    config = case.config()
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(reference)
    reference.save_pretrained(folder)
    return reference


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> NativeModel:
    config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec("tiny", ModelFiles("hf", folder, "tiny"), config, config["vocab_size"], 256, frozenset())
    return build(spec, dtype, **settings)


def build(spec: ModelSpec, dtype: torch.dtype, **settings: Any) -> NativeModel:
    attention = TorchSdpa(TorchSdpaSettings(), AttentionContext(CPU, dtype, BLOCK))
    quant = Dense(DenseSettings(), QuantContext(CPU, dtype))
    context = ModelContext(spec, CPU, dtype, attention, quant, progress=lambda what, done, total: None)
    return NativeModel(NativeSettings(**settings), context)


def caches(model: NativeModel, num_blocks: int) -> list[torch.Tensor]:
    """Full of NaN: a read of a slot that was not written shows."""
    shapes = [model._attention.kv_shape(spec, num_blocks) for spec in model.attention_specs]
    return [torch.full(shape, float("nan"), dtype=model._dtype) for shape in shapes]


def prompt(length: int) -> list[int]:
    return torch.randint(0, BASE["vocab_size"], (length,), generator=torch.Generator().manual_seed(2)).tolist()


def reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_full_prefill_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = save(CASES[name], tmp_path)
    model, ids = load(tmp_path), prompt(53)
    batch = batch_of([Share("a", ids, 0, 53, [5, 2, 7, 3], logits="all")], BLOCK)
    logits = model.forward(batch, caches(model, 8))
    expected = reference_logits(reference, ids)
    assert logits.dtype == torch.float32 and logits.shape == (53, BASE["vocab_size"])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_chunked_prefill_then_decode_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = save(CASES[name], tmp_path)
    model, ids = load(tmp_path), prompt(61)
    kv = caches(model, 8)
    rows = []
    for start, end in [(0, 7), (7, 30), (30, 45), *((p, p + 1) for p in range(45, 61))]:
        batch = batch_of([Share("a", ids, start, end - start, [5, 2, 7, 3], logits="all")], BLOCK)
        rows.append(model.forward(batch, kv))
    torch.testing.assert_close(torch.cat(rows), reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3"])
def test_greedy_ids_of_a_mixed_batch_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save(CASES[name], tmp_path)
    model = load(tmp_path)
    sequences = {"a": prompt(37), "b": prompt(5), "c": prompt(20)}
    tables = {"a": [0, 4, 8, 1, 9, 5, 12], "b": [2, 6, 10, 13, 14], "c": [3, 7, 11, 15, 16, 17]}
    kv, computed = caches(model, 18), dict.fromkeys(sequences, 0)
    for _ in range(64):
        shares = [Share(r, ids, computed[r], len(ids) - computed[r], tables[r]) for r, ids in sequences.items()]
        sampled = model.forward(batch_of(shares, BLOCK), kv).argmax(-1).tolist()
        for (request, ids), token in zip(sequences.items(), sampled, strict=True):
            computed[request] = len(ids)
            ids.append(token)
    for request, length in {"a": 37, "b": 5, "c": 20}.items():
        expected = reference_logits(reference, sequences[request][:-1])[length - 1 :].argmax(-1).tolist()
        assert sequences[request][length:] == expected


def test_logits_only_where_wanted(tmp_path: Path) -> None:
    save(CASES["llama"], tmp_path)
    model, ids = load(tmp_path), prompt(20)
    whole = model.forward(batch_of([Share("a", ids, 0, 20, [0, 1], logits="all")], BLOCK), caches(model, 4))
    none = Share("a", ids, 0, 20, [0, 1], logits="none")
    last = Share("b", ids, 0, 20, [2, 3], logits="last")
    some = model.forward(batch_of([none, last], BLOCK), caches(model, 4))
    torch.testing.assert_close(some, whole[-1:], atol=1e-5, rtol=1e-5)
    assert model.forward(batch_of([none], BLOCK), caches(model, 4)).shape == (0, BASE["vocab_size"])


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    reference = save(CASES["gemma3"], tmp_path)
    model, ids = load(tmp_path, torch.bfloat16), prompt(53)
    batch = batch_of([Share("a", ids, 0, 53, [0, 1, 2, 3], logits="all")], BLOCK)
    gap = model.forward(batch, caches(model, 4)) - reference_logits(reference, ids)
    assert gap.abs().mean() < 0.05 * reference_logits(reference, ids).std()


def test_old_config_spelling_gives_the_same_model(tmp_path: Path) -> None:
    reference = save(CASES["llama3"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = prompt(40)
    model = load(tmp_path)
    logits = model.forward(batch_of([Share("a", ids, 0, 40, [0, 1, 2], logits="all")], BLOCK), caches(model, 3))
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["tiny-h128-F16.gguf", "tiny-h128-Q4_1.gguf"])
def test_gguf_weights_equal_transformers(name: str) -> None:
    """The same decoder on a GGUF file: dequantised, rows of q and k back in place, tied head included."""
    folder = Path(__file__).parents[1] / "data" / "gguf"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    model = build(read_spec(ModelFiles("gguf", folder / name, name)), torch.float32)
    ids = prompt(40)
    logits = model.forward(batch_of([Share("a", ids, 0, 40, [0, 1, 2], logits="all")], BLOCK), caches(model, 3))
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=1e-4, rtol=1e-4)
