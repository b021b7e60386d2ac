"""The transformers model plugin against transformers' own forward pass: tiny random models, float32.

Each family runs two requests through prefill, chunks and a mixed batch of chunk and decode, on shuffled cache blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from core.batch import ModelBatch
from core.errors import ConfigError, GenerationError, ModelFileError, PluginError
from core.model.describe import read_spec
from core.model.interface import AttentionContext, AttentionSpec, Linear, ModelContext
from core.model.spec import ModelFiles, ModelSpec
from core.testing.batches import Share, batch_of
from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TorchSdpa
from plugins.models.paged_attention import mask_marker
from plugins.models.settings import TransformersSettings
from plugins.models.transformers_model import TransformersModel

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, VOCAB = 4, 16, 97
GGUF = Path(__file__).parents[1] / "data/gguf/tiny-h128-F16.gguf"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Part:
    request: int
    start: int
    stop: int


def batch(sequences: Sequence[torch.Tensor], parts: Sequence[Part]) -> ModelBatch:
    """All positions' logits are wanted. Each request owns every second block, in falling order."""
    shares = [
        Share(
            request_id=str(part.request),
            token_ids=sequences[part.request].tolist(),
            start=part.start,
            num_tokens=part.stop - part.start,
            block_table=range(NUM_BLOCKS - 1 - part.request, -1, -2),
            logits="all",
        )
        for part in parts
    ]
    return batch_of(shares, BLOCK_SIZE)


class PlainQuant:
    def __init__(self) -> None:
        self.names: list[str] = []

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.names.append(name)
        return lambda x: torch.nn.functional.linear(x, weight, bias)


def attention() -> TorchSdpa:
    return TorchSdpa(TorchSdpaSettings(), AttentionContext(CPU, torch.float32, BLOCK_SIZE))


def build(
    folder: Path, quant: PlainQuant | None = None, max_model_len: int = 64, kind: str = "hf"
) -> TransformersModel:
    files = ModelFiles(kind, folder, str(folder))
    spec = ModelSpec(folder.name, files, {}, VOCAB, max_model_len, frozenset({1}))
    if kind == "gguf":
        spec = read_spec(files)
    context = ModelContext(spec, CPU, torch.float32, attention(), quant or PlainQuant(), lambda *_: None)
    return TransformersModel(TransformersSettings(), context)


def save(folder: Path, model_type: str, **changes: Any) -> Path:
    """A random model of the family, with weights large enough that every part of it shows in the logits."""
    config = transformers.AutoConfig.for_model(model_type, **SMALL | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "mistral": {"sliding_window": 5},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_positions": 64},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi": {},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "starcoder2": {"sliding_window": 6},
    "gpt_bigcode": {"multi_query": True},
    "exaone4": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {"head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "nemotron": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 8},
    "olmoe": MOE,
}
STEPS = (
    (Part(0, 0, 4), Part(1, 0, 7)),  # a first chunk beside a whole prompt
    (Part(1, 7, 8), Part(0, 4, 10)),  # a decode beside a later chunk
    (Part(0, 10, 11), Part(1, 8, 9)),  # two decodes
)


def empty_caches(model: TransformersModel) -> list[torch.Tensor]:
    """Filled with NaN, so that a read of what was never written shows."""
    return [torch.full(attention().kv_shape(spec, NUM_BLOCKS), torch.nan) for spec in model.attention_specs]


def run(model: TransformersModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every position, by request."""
    caches = empty_caches(model)
    rows: list[list[torch.Tensor]] = [[], []]
    for parts in STEPS:
        logits = model.forward(batch(sequences, parts), caches)
        for part, chunk in zip(parts, logits.split([part.stop - part.start for part in parts]), strict=True):
            rows[part.request].append(chunk)
    return [torch.cat(chunks) for chunks in rows]


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in (11, 9)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    save(tmp_path, model_type, **FAMILIES[model_type])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    model = build(tmp_path)
    for got, ids in zip(run(model, sequences), sequences, strict=True):
        with torch.inference_mode():
            expected = reference(input_ids=ids[None]).logits[0]
        assert got.dtype == torch.float32 and expected.std() > 0.01
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_gguf_files_run_as_transformers_reads_them(sequences: list[torch.Tensor]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32).eval()
    for got, ids in zip(run(build(GGUF, kind="gguf"), sequences), sequences, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(got, reference(input_ids=ids[None]).logits[0], atol=2e-4, rtol=2e-4)


def test_layers_are_described_by_what_they_ask_for(tmp_path: Path) -> None:
    save(tmp_path, "gemma2", **FAMILIES["gemma2"], query_pre_attn_scalar=9)
    sliding, full = build(tmp_path).attention_specs
    assert sliding == AttentionSpec(0, 4, 2, 16, 9**-0.5, sliding_window=5, softcap=2.0)
    assert full == AttentionSpec(1, 4, 2, 16, 9**-0.5, sliding_window=None, softcap=2.0)


def test_only_wanted_rows_are_returned(tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    model = build(save(tmp_path, "llama"))
    caches = empty_caches(model)
    step = batch(sequences, STEPS[0])
    rows = model.forward(step, caches)
    wanted = replace(step, logits_indices=torch.tensor([10, 3]))
    torch.testing.assert_close(model.forward(wanted, caches), rows[[10, 3]])


class HalvingQuant(PlainQuant):
    """A method whose effect shows."""

    def linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return super().linear(name, weight * 0.5 if name == "lm_head" else weight, bias)


def test_quant_method_gets_every_linear_layer_by_its_name(tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    save(tmp_path, "gpt_neox", **FAMILIES["gpt_neox"])
    plain, quant = build(tmp_path), HalvingQuant()
    quantized = build(tmp_path, quant)
    assert "gpt_neox.layers.1.attention.query_key_value" in quant.names and "lm_head" in quant.names
    assert len(quant.names) == 2 * 4 + 1
    for one, two in zip(run(plain, sequences), run(quantized, sequences), strict=True):
        torch.testing.assert_close(one * 0.5, two)


def test_scale_that_changes_while_running_is_an_error(tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    model = build(save(tmp_path, "llama"))
    model._model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(GenerationError, match="layer 1 .*scale"):
        run(model, sequences)


MAMBA = {"state_size": 4, "expand": 2}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba", MAMBA, "linear_attention"),
        ("bloom", {}, "BloomForCausalLM.*attention interface"),
        ("gpt_oss", MOE | {"layer_types": ["full_attention"] * 2}, "s_aux"),
        ("deepseek_v3", MOE | {"v_head_dim": 4, "n_routed_experts": 4, "n_group": 1}, "values of 4 and keys of"),
        ("diffllama", {}, "more than once"),
        ("llama4_text", MOE, "chunked_attention"),
        ("bart", {"d_model": 32}, "BartForCausalLM|encoder-decoder"),
    ],
)
def test_models_it_cannot_run_are_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, model_type, **changes)
    with pytest.raises(PluginError, match=rf"{model_type}.*({message})"):
        build(tmp_path)


def _edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_encoder_decoders_and_unknown_types_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(PluginError, match="t5 is an encoder-decoder"):
        build(_edit_config(tmp_path, model_type="t5"))
    with pytest.raises(PluginError, match="vit has no causal"):
        build(_edit_config(tmp_path, model_type="vit"))
    with pytest.raises(ModelFileError, match="cannot load"):
        build(_edit_config(tmp_path, model_type="no-such-type"))


def test_quantized_checkpoints_are_left_to_the_native_model(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(PluginError, match="model.name=native"):
        build(_edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4}))


def test_code_of_the_repository_is_never_run(tmp_path: Path, sequences: list[torch.Tensor]) -> None:
    save(tmp_path, "llama")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    assert len(run(build(_edit_config(tmp_path, auto_map=names)), sequences)) == 2
    with pytest.raises(ModelFileError):
        build(_edit_config(tmp_path, model_type="evil"))
    assert not (tmp_path / "ran").exists()


def test_rope_that_depends_on_batch_mates_bounds_the_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    save(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(ConfigError, match="max_model_len=32"):
        build(tmp_path, max_model_len=64)
    assert len(build(tmp_path, max_model_len=32).attention_specs) == 2


def test_pickled_and_truncated_weights_are_refused(tmp_path: Path) -> None:
    weights = save(tmp_path, "llama") / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFileError, match="cannot load"):
        build(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="cannot load"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (causal_mask_function, 0),
        (sliding_window_causal_mask_function(7), 7),
        (chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)), -1),
        (bidirectional_mask_function, -1),
    ],
)
def test_masks_are_recognised_by_what_they_show(mask: Callable[..., torch.Tensor], kind: int) -> None:
    assert mask_marker(mask_function=mask).item() == kind


def test_tokens_that_mix_outside_attention_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")

    def shifted(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) + x.roll(1, dims=1)

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    with pytest.raises(PluginError, match="mixes tokens outside attention"):
        build(tmp_path)
