"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it: v1, whose zero points are stored less one, and v2.

`qweight` int32 [in * bits / 32, out], values one after another down the inputs; `qzeros` int32 [groups, out * bits / 32];
`scales` [groups, out]; `g_idx` int32 [in], the group of each input, which act-order permutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from core.model.quantized.bits import unpack, words_for
from core.model.quantized.scheme import Module, QuantConfig, group_of, grouped, inputs_per_group

BITS = (2, 3, 4, 8)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is to be added to stored zero points."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Of `dynamic`: for modules that a pattern matches, other bits and groups than elsewhere."""

    matches: Callable[[str], bool]
    bits: int
    group_size: int


class Gptq:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    markers: ClassVar[tuple[str, ...]] = ("qweight",)
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: QuantConfig):
        self._bits: int = config.choice("bits", BITS)
        self._group_size = config.group_size()
        stored = config.first("checkpoint_format", "format")
        self._zero_offset = ZERO_OFFSETS[config.choice(stored, tuple(ZERO_OFFSETS), "gptq")]
        config.choice("pack_dtype", ("int32",), "int32")
        self._rules = tuple(_rules(config, self._bits, self._group_size))

    def floats(self, module: Module) -> Tensor:
        bits, group_size = self._sizes(module)
        packed = module.matrix("qweight", torch.int32)
        num_inputs, num_outputs = packed.shape[0] * 32 // bits, packed.shape[1]
        size = inputs_per_group(group_size, num_inputs)
        num_groups = -(-num_inputs // size)
        codes = unpack(packed.t().contiguous(), bits, num_inputs).t()
        packed = module.tensor("qzeros", (num_groups, words_for(num_outputs, bits)), torch.int32)
        zeros = unpack(packed, bits, num_outputs).to(torch.int16) + self._zero_offset
        scales = module.tensor("scales", (num_groups, num_outputs))
        return grouped(codes, zeros, scales, group_of(module, "g_idx", num_inputs, size))

    def _sizes(self, module: Module) -> tuple[int, int]:
        """Bits and group size."""
        for rule in self._rules:
            if rule.matches(module.name):
                return rule.bits, rule.group_size
        return self._bits, self._group_size


def _rules(config: QuantConfig, bits: int, group_size: int) -> list[Rule]:
    """`+:` and no prefix override; what `-:` matches is not quantized, which its tensors show."""
    dynamic = config.at("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise config.refuse("dynamic", "is no table of patterns")
    found = []
    for text, changes in dynamic.items():
        if text.startswith("-:"):
            continue
        own = QuantConfig({"bits": bits, "group_size": group_size, **changes}, f"{config.location}: dynamic {text!r}")
        matches = config.pattern("dynamic", text.removeprefix("+:"))
        found.append(Rule(matches, own.choice("bits", BITS), own.group_size()))
    return found
