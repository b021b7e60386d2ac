"""Config dict -> Architecture: what each family fixes, both key spellings, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import ConfigError
from core.model.arch import Architecture, read_architecture
from core.model.rope import RopePlan, inverse_frequencies

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def arch(**changes: Any) -> Architecture:
    return read_architecture({**LLAMA, **changes})


def windows(architecture: Architecture) -> list[int | None]:
    return [layer.attention.sliding_window for layer in architecture.layers]


def test_llama_is_plain() -> None:
    plan = arch()
    layer = plan.layers[2]
    assert (layer.name, layer.norms, layer.qk_norm, layer.activation) == ("model.layers.2", "pre", False, "silu")
    assert (layer.qkv_bias, layer.output_bias, layer.mlp_bias) == (False, False, False)
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim) == (4, 2, 16)
    assert layer.attention.scale == 16**-0.5 and layer.attention.layer == 2
    assert plan.ropes == (RopePlan("default", 16, 10_000.0),)
    assert not plan.tied_embeddings and plan.norm_offset == 0.0 and plan.embedding_scale == 1.0


def test_defaults_of_keys_a_config_may_leave_out() -> None:
    assert arch(num_key_value_heads=None).layers[0].attention.num_kv_heads == 4
    assert arch(model_type="qwen3").layers[0].attention.head_dim == 128
    gemma = arch(model_type="gemma2")
    assert gemma.tied_embeddings and gemma.final_softcap == 30.0
    assert gemma.layers[0].attention.softcap == 50.0 and gemma.layers[0].attention.head_dim == 256
    assert gemma.layers[0].activation == "gelu_pytorch_tanh"
    assert arch(model_type="gemma2", final_logit_softcapping=None).final_softcap is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3, "use_sliding_window": True},
            [None, None, None, 8],
        ),
        ({"model_type": "gemma2", "sliding_window": 8}, [8, None, 8, None]),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None, 8]),
        (
            {
                "model_type": "gemma2",
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            [None, None, None, 8],
        ),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(arch(**changes)) == expected


def test_biases_follow_the_family() -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        layer = arch(**changes).layers[0]
        return layer.qkv_bias, layer.output_bias, layer.mlp_bias

    assert biases(attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen2", attention_bias=True) == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True, False)


def test_gemma3_has_two_ropes_in_both_spellings() -> None:
    old = arch(
        model_type="gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    new = arch(
        model_type="gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old.ropes == new.ropes == (RopePlan("default", 256, 1e4), RopePlan("linear", 256, 1e6, 8.0))
    assert [layer.rope for layer in new.layers] == [0, 1, 0, 1]


def test_old_and_new_rope_keys_agree() -> None:
    old = arch(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = arch(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    both = arch(
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **LLAMA3},
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    )
    assert old == new == both
    with pytest.raises(ConfigError, match="disagree on factor"):
        arch(
            rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 4.0}
        )


def test_original_length_falls_back_to_the_models_own() -> None:
    assert arch(rope_scaling={"rope_type": "yarn", "factor": 2.0}).ropes[0].original_max_position_embeddings == 512


def test_unknown_model_type_names_the_next_step() -> None:
    with pytest.raises(ConfigError, match=r"'mamba' has no native plan .*model=transformers"):
        arch(model_type="mamba")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"use_bidirectional_attention": True, "model_type": "gemma3_text"}, "use_bidirectional_attention"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"mlp_bias": True, "model_type": "mistral"}, "mlp_bias"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: must be a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads: must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"layer_types": ["full_attention"]}, "layer_types: needs 4 entries"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: needs 4 entries"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types: layers of this model type"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "sliding_window is off"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: must be a positive number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "rope_parameters.beta_fast"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": ["default"]}, "rope_parameters: must be a mapping"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {}}}, "rope_parameters.full_attention"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1.0}}, "one entry each"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arch(**changes)
    assert message in str(caught.value)


def test_unknown_keys_that_are_off_or_neutral_or_allowed_pass() -> None:
    config = {**LLAMA, "new_switch": False, "_name_or_path": "x", "eos_token_id": [1, 2], "torch_dtype": "bfloat16"}
    assert read_architecture(config) == arch()
    assert read_architecture({**LLAMA, "made_with": "care"}, ignored_keys=["made_with"]) == arch()
    with pytest.raises(ConfigError, match=r"model.ignore_config_keys=\[made_with\]"):
        read_architecture({**LLAMA, "made_with": "care"})


def test_plans_are_frozen_and_comparable() -> None:
    assert hash(arch()) == hash(arch()) and arch() != arch(rms_norm_eps=1e-6)


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    plain = inverse_frequencies(RopePlan("default", 64, 10_000.0))
    yarn = inverse_frequencies(RopePlan("yarn", 64, 10_000.0, 4.0, 4096))
    torch.testing.assert_close(yarn[:4], plain[:4])
    torch.testing.assert_close(yarn[-4:], plain[-4:] / 4)
    assert bool((yarn <= plain).all()) and bool((yarn >= plain / 4).all())
