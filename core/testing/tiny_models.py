"""Whole models small enough to make in a test: random weights, a real tokenizer, the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from core.testing.tokenizers import byte_level_bpe, save_tokenizer

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # far from uniform: another prompt, or a wrong detail, gives other tokens
}


def make_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """Write a random model of a `transformers` model type into `folder` and return it. 400 KB; 0.1 s, beside the import.

    `config` goes to the config class. The tokenizer is `byte_level_bpe`: 330 ids, ChatML template, `</s>` and
    `<|im_end|>` end a text, which the model never prefers. Same weights for the same arguments; the global random state
    is left as it was.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    tokenizer = byte_level_bpe()
    folder.mkdir(parents=True, exist_ok=True)
    ends = sorted(tokenizer.eos_token_ids)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends, "pad_token_id": tokenizer.special.pad_token_id}
    values = {**_SMALL, "vocab_size": tokenizer.vocab_size, **ids, **config}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = auto.from_config(transformers.AutoConfig.for_model(family, **values), dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[sorted(tokenizer.special_token_ids)] = 0.0
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder
