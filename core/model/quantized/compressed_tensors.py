"""compressed-tensors, as llm-compressor writes it: integers in words or bytes, and float8; each group of modules as it says.

Activations stay as they are: what `input_activations` asks for is not done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.model.quantized.bits import unpack, words_for
from core.model.quantized.fp8 import FLOAT8, spread
from core.model.quantized.scheme import Module, QuantConfig, group_of, grouped, inputs_per_group

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("group", "channel", "tensor", "block")


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """Modules that are quantized alike."""

    targets: tuple[Callable[[str], bool], ...]
    packed: bool
    bits: int
    symmetric: bool
    group_size: int  # -1: a scale for each output, or one
    block: tuple[int, int] | None


class CompressedTensors:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )
    markers: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    unused: ClassVar[tuple[str, ...]] = (
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
        "q_scale",
    )

    def __init__(self, config: QuantConfig):
        for key in ("sparsity_config", "transform_config"):
            if config.at(key):
                raise config.refuse(key, "is not read: the weights would be others")
        config.choice("quantization_status", ("compressed",), "compressed")
        groups = config.at("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise config.refuse("config_groups", "says of no module how it is quantized")
        self._groups = tuple(_group(config, f"config_groups.{name}") for name in groups)

    def floats(self, module: Module) -> Tensor:
        group = next((group for group in self._groups if any(target(module.name) for target in group.targets)), None)
        if group is None:
            raise module.error("weight_scale", "no target of quantization_config.config_groups has this module")
        if group.packed:
            return _packed(module, group)
        weight = module.tensor("weight")
        if weight.dtype not in (torch.int8, FLOAT8) or weight.dim() != 2:
            raise module.error("weight", f"holds {weight.dtype} {list(weight.shape)}, not a matrix of int8 or float8")
        if group.group_size != -1:
            return _grouped(module, group, weight.float().t())
        scale = spread(module, "weight_scale", (weight.shape[0], weight.shape[1]), group.block)
        if group.symmetric:
            return weight.float() * scale
        return (
            weight.float() - spread(module, "weight_zero_point", (weight.shape[0], weight.shape[1]), group.block)
        ) * scale


def _packed(module: Module, group: ConfigGroup) -> Tensor:
    """`weight_packed` int32 [out, in * bits / 32] along the inputs, with half the range added."""
    shape = module.tensor("weight_shape", (2,)).tolist()
    num_outputs, num_inputs = int(shape[0]), int(shape[1])
    if min(num_outputs, num_inputs) < 1:
        raise module.error("weight_shape", f"says {shape}")
    packed = module.tensor("weight_packed", (num_outputs, words_for(num_inputs, group.bits)), torch.int32)
    codes = unpack(packed, group.bits, num_inputs).to(torch.int16) - (1 << (group.bits - 1))
    return _grouped(module, group, codes.t())


def _grouped(module: Module, group: ConfigGroup, codes: Tensor) -> Tensor:
    """codes [in, out], signed. Zero points are packed along the outputs where weights are packed."""
    num_inputs, num_outputs = codes.shape
    size = inputs_per_group(group.group_size, num_inputs)
    num_groups = -(-num_inputs // size)
    scales = module.tensor("weight_scale")
    scales = scales.expand(num_outputs, 1) if scales.numel() == 1 else scales
    if tuple(scales.shape) != (num_outputs, num_groups):
        raise module.error(
            "weight_scale", f"has shape {list(scales.shape)}, for {num_outputs} outputs and {num_groups} groups"
        )
    zeros: Tensor | float = 0.0
    if not group.symmetric and group.packed:
        stored = module.tensor("weight_zero_point", (words_for(num_outputs, group.bits), num_groups), torch.int32)
        values = unpack(stored.t().contiguous(), group.bits, num_outputs)
        zeros = values.to(torch.int16) - (1 << (group.bits - 1))
    elif not group.symmetric:
        zeros = module.tensor("weight_zero_point", (num_outputs, num_groups)).t()
    return grouped(codes, zeros, scales.t(), group_of(module, "weight_g_idx", num_inputs, size))


def _group(config: QuantConfig, place: str) -> ConfigGroup:
    form = config.at(f"{place}.format")
    form = config.choice(f"{place}.format" if form is not None else "format", FORMATS)
    kind = config.choice(f"{place}.weights.type", ("int", "float"))
    strategy = config.choice(f"{place}.weights.strategy", STRATEGIES)
    allowed = (8,) if kind == "float" else tuple(range(2, 9)) if form == "pack-quantized" else (4, 8)
    bits: int = config.choice(f"{place}.weights.num_bits", allowed)
    block = config.at(f"{place}.weights.block_structure") if strategy == "block" else None
    if strategy == "block" and (not isinstance(block, list) or len(block) != 2):
        raise config.refuse(f"{place}.weights.block_structure", "is no pair of sizes")
    return ConfigGroup(
        targets=tuple(_target(config, place, text) for text in config.at(f"{place}.targets") or ()),
        packed=form == "pack-quantized",
        bits=bits,
        symmetric=bool(config.choice(f"{place}.weights.symmetric", (True, False), True)),
        group_size=config.group_size(f"{place}.weights.group_size") if strategy == "group" else -1,
        block=None if block is None else (int(block[0]), int(block[1])),
    )


def _target(config: QuantConfig, place: str, text: Any) -> Callable[[str], bool]:
    """A pattern after `re:`, the name of a module, or of its class, of which quantized matrices have one: Linear."""
    if not isinstance(text, str):
        raise config.refuse(f"{place}.targets", "has what is no text")
    if not text.startswith("re:"):
        return lambda name: text in ("Linear", name)
    return config.pattern(f"{place}.targets", text.removeprefix("re:"))
