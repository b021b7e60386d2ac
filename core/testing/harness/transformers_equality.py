"""A GGUF file beside what transformers' own loader makes of it: config and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from core.model.gguf import GGUFFile
from core.model.gguf_config import read_hf_config
from core.model.gguf_weights import file_weights, read_hf_tensor

SHARED_KEYS = {
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "hidden_activation",
    "hidden_act",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
}


def assert_equals_transformers(file: GGUFFile, model: Any) -> None:
    """`model`: the same file in float32, weights equal to the last bit."""
    theirs = model.state_dict()
    assert set(file_weights(file)) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(read_hf_tensor(file, name), value), name
    ours = AutoConfig.for_model(**read_hf_config(file)).to_dict()
    wanted = model.config.to_dict()
    for key in SHARED_KEYS & set(wanted):
        assert ours[key] == wanted[key], key
    assert ours["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps, rel=1e-6)
