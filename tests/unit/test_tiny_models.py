"""The tiny models that tests are made of: complete, seeded, and the same to us as to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from core.model.describe import read_spec
from core.model.sources import resolve
from core.model.tokenizer import load_tokenizer
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import byte_level_bpe


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_folder_is_a_model_with_the_tokenizer_it_was_made_with(tiny: Path) -> None:
    files = resolve(str(tiny), cache_dir=tiny, progress=lambda what, done, total: None)
    spec, tokenizer = read_spec(files), load_tokenizer(files)
    made = byte_level_bpe()
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (made.vocab_size, 512, made.eos_token_ids)
    text = "Hello, <|im_start|> 漢字 🔥\n"
    assert tokenizer.encode(text) == made.encode(text) == AutoTokenizer.from_pretrained(tiny).encode(text)
    assert tokenizer.chat_template == made.chat_template
    assert tokenizer.eos_token_ids == made.eos_token_ids


def test_weights_depend_on_the_seed_alone(tiny: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    again, other = make_tiny_model(tmp_path / "again"), make_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, different = (load_file(folder / "model.safetensors") for folder in (tiny, again, other))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(first[name], same[name]) and not torch.equal(first[name], different[name])


def test_another_family_and_size(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "qwen", "qwen3", num_hidden_layers=1, head_dim=32)
    spec = read_spec(resolve(str(folder), cache_dir=tmp_path, progress=lambda what, done, total: None))
    assert (spec.config["model_type"], spec.config["num_hidden_layers"], spec.config["head_dim"]) == ("qwen3", 1, 32)
