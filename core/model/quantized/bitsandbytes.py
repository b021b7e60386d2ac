"""bitsandbytes in 4 bits (NF4 of QLoRA, arXiv:2305.14314, and FP4): a table of 16 values, and the largest of each block.

`weight` uint8 [out * in / 2, 1], the higher four bits first, blocks over the flattened matrix; `weight.quant_map` float32 [16];
`weight.absmax` float32 [blocks]; `weight.quant_state.bitsandbytes__…` JSON in bytes, with the shape.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from core.model.quantized.scheme import Module, QuantConfig

STATE = "weight.quant_state.bitsandbytes__"


class State(msgspec.Struct, frozen=True):
    """What is read of the JSON."""

    shape: tuple[int, int]
    blocksize: int


class BitsAndBytes:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "weight.absmax", "weight.quant_map", f"{STATE}nf4", f"{STATE}fp4")
    markers: ClassVar[tuple[str, ...]] = ("weight.quant_map",)
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: QuantConfig):
        config.choice("load_in_8bit", (False,), False)
        config.choice("bnb_4bit_use_double_quant", (False,), False)
        self._state = STATE + str(config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "nf4"))

    def floats(self, module: Module) -> Tensor:
        state = _state(module, self._state)
        num_values = state.shape[0] * state.shape[1]
        stored = module.tensor("weight", dtype=torch.uint8).flatten()
        if len(stored) != -(-num_values // 2):
            raise module.error("weight", f"has {len(stored)} bytes, for a matrix {list(state.shape)} of 4 bits")
        table = module.tensor("weight.quant_map", (16,)).float()
        largest = module.tensor("weight.absmax", (-(-num_values // state.blocksize),), torch.float32)
        codes = torch.stack((stored >> 4, stored & 15), 1).flatten()[:num_values]
        scale = largest.repeat_interleave(state.blocksize)[:num_values]
        return (table[codes.long()] * scale).view(state.shape)


def _state(module: Module, suffix: str) -> State:
    text: Any = module.tensor(suffix, dtype=torch.uint8).numpy().tobytes()
    try:
        found = msgspec.json.decode(text, type=State)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise module.error(suffix, f"is not the JSON of a quantized matrix ({error})") from None
    if min(*found.shape, found.blocksize) < 1:
        raise module.error(suffix, f"says shape {list(found.shape)} and blocks of {found.blocksize}")
    return found
