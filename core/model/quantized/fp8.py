"""Weights in float8: with a scale each for blocks, outputs or the whole matrix, by which they are multiplied.

DeepSeek's checkpoints call the multiplier `weight_scale_inv`; GPTQModel's have a divisor under that name, and say so.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from core.model.quantized.scheme import Module, QuantConfig

FLOAT8 = torch.float8_e4m3fn


class Fp8:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv")
    markers: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_inv")
    unused: ClassVar[tuple[str, ...]] = (
        "input_scale",
        "activation_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "prob_output_scale",
    )

    def __init__(self, config: QuantConfig):
        stored = config.first("fmt", "checkpoint_format", "format")
        config.choice(stored, ("e4m3", "float8_e4m3fn"), "e4m3")
        self._divides = config.choice("weight_scale_semantics", ("inverse", "multiply"), "multiply") == "inverse"
        self._block = _block(config)

    def floats(self, module: Module) -> Tensor:
        weight = module.matrix("weight", FLOAT8)
        suffix = "weight_scale_inv" if "weight_scale_inv" in module.suffixes else "weight_scale"
        scale = spread(module, suffix, (weight.shape[0], weight.shape[1]), self._block)
        return weight.float() / scale if self._divides and suffix == "weight_scale_inv" else weight.float() * scale


def _block(config: QuantConfig) -> tuple[int, int] | None:
    """Outputs and inputs of a block."""
    found = config.at("weight_block_size")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        raise config.refuse("weight_block_size", "is no pair of sizes")
    return (found[0], found[1])


def spread(module: Module, suffix: str, shape: tuple[int, int], block: tuple[int, int] | None = None) -> Tensor:
    """float32, to be multiplied with a matrix of `shape`: of the whole, of each output, or of blocks."""
    scale = module.tensor(suffix).float()
    if scale.numel() == 1:
        return scale.view(1, 1)
    if block is not None:
        rows, columns = (-(-size // part) for size, part in zip(shape, block, strict=True))
        if tuple(scale.shape) == (rows, columns):
            return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    elif scale.numel() == shape[0] and scale.shape[0] == shape[0]:
        return scale.view(-1, 1)
    of = f"of blocks {list(block)}" if block else "one for each output, or one"
    raise module.error(suffix, f"has shape {list(scale.shape)}, for a weight {list(shape)} with scales {of}")
