"""The weights of a model moved off the grid of 4 bits that they lie on.

A file of 4-bit weights says nothing of what rounding to 4 bits costs: it was done before, and is done to the same numbers again.
Here each weight of a layer is moved, at random, by up to half the distance of the grid's points, as far as rounding may have
moved it. What comes out is another model, whose own perplexity is the base.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from core.model.spec import ModelSpec
from core.model.tokenizer import load_tokenizer
from core.model.weights import open_weights
from core.testing.tokenizers import save_tokenizer

GROUP = 32  # weights with a scale and a least value of their own, in Q4_1 and in ours
STEPS = 15  # between the least of a group and the greatest
LAYERS = "model.layers."


def write_off_grid(spec: ModelSpec, folder: Path, seed: int = 0) -> Path:
    """A folder of safetensors in float32. The same for the same seed; embedding, head and norms stay as they are."""
    source, generator = open_weights(spec.files), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in sorted(source.names()):
        weight = source.read(name, torch.float32)
        is_matrix = name.startswith(LAYERS) and weight.dim() == 2
        tensors[name] = moved(weight, generator) if is_matrix else weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(load_tokenizer(spec.files), folder)
    (folder / "config.json").write_text(json.dumps(dict(spec.config)), encoding="utf-8")
    return folder


def moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    """float32 [n, k] plus even noise of up to half a step of each group of 32."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    steps = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / STEPS
    noise = (torch.rand(groups.shape, generator=generator) - 0.5) * steps
    return (groups + noise).view(len(weight), -1)[:, : weight.shape[1]].contiguous()
