"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it: v1, whose zero points are stored less one, and v2.

`qweight` int32 [in * bits / 32, out], values one after another down the inputs; `qzeros` int32 [groups, out * bits / 32];
`scales` [groups, out]; `g_idx` int32 [in], the group of each input, which act-order permutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import regex
import torch
from torch import Tensor

from core.model.quantized.bits import unpack, words_for
from core.model.quantized.scheme import Module, QuantConfig, grouped, in_order

BITS = (2, 3, 4, 8)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is to be added to stored zero points."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Of `dynamic`: for modules that a pattern matches, other bits and groups than elsewhere."""

    pattern: Any  # of the regex package, whose matches may be given a time
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
        stored = "checkpoint_format" if config.at("checkpoint_format") is not None else "format"
        self._zero_offset = ZERO_OFFSETS[config.choice(stored, tuple(ZERO_OFFSETS), "gptq")]
        config.choice("pack_dtype", ("int32",), "int32")
        self._rules = tuple(_rules(config, self._bits, self._group_size))

    def floats(self, module: Module) -> Tensor:
        bits, group_size = self._sizes(module)
        packed = module.matrix("qweight", torch.int32)
        num_inputs, num_outputs = packed.shape[0] * 32 // bits, packed.shape[1]
        size = num_inputs if group_size == -1 else group_size
        num_groups = -(-num_inputs // size)
        codes = unpack(packed.t().contiguous(), bits, num_inputs).t()
        packed = module.tensor("qzeros", (num_groups, words_for(num_outputs, bits)), torch.int32)
        zeros = unpack(packed, bits, num_outputs).to(torch.int16) + self._zero_offset
        scales = module.tensor("scales", (num_groups, num_outputs))
        return grouped(codes, zeros, scales, _groups(module, num_inputs, size, num_groups))

    def _sizes(self, module: Module) -> tuple[int, int]:
        """Bits and group size."""
        for rule in self._rules:
            try:
                if rule.pattern.match(module.name, timeout=1.0):
                    return rule.bits, rule.group_size
            except TimeoutError:
                raise module.error("qweight", "a pattern of quantization_config.dynamic takes too long") from None
        return self._bits, self._group_size


def _groups(module: Module, num_inputs: int, group_size: int, num_groups: int) -> Tensor:
    if "g_idx" not in module.suffixes:
        return in_order(num_inputs, group_size)
    found = module.tensor("g_idx", (num_inputs,)).long()
    if found.min() < 0 or found.max() >= num_groups:
        raise module.error("g_idx", f"names group {int(found.max())}, there are {num_groups}")
    return found


def _rules(config: QuantConfig, bits: int, group_size: int) -> list[Rule]:
    """`+:` and no prefix override; what `-:` matches is not quantized, which its tensors show."""
    dynamic = config.at("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise config.refuse("dynamic", "is no table of patterns")
    found = []
    for text, changes in dynamic.items():
        if text.startswith("-:"):
            continue
        try:
            pattern = regex.compile(text.removeprefix("+:"))
        except regex.error as error:
            raise config.refuse("dynamic", f"{text!r} is no pattern: {error}") from None
        own = QuantConfig({"bits": bits, "group_size": group_size, **changes}, f"{config.location}: dynamic {text!r}")
        found.append(Rule(pattern, own.choice("bits", BITS), own.group_size()))
    return found
