"""torchao's weights in int8, as transformers saves them: parts are named after the tensor, its kind is in the file's metadata.

`_weight_qdata` int8 [out, in]; `_weight_scale` [out, in / block]; `_weight_zero_point` likewise, for kinds that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from core.model.quantized.scheme import Module, QuantConfig, grouped, in_order

KINDS = ("Int8WeightOnlyConfig",)


class TorchAo:
    """See `core.model.quantized.scheme.Scheme`."""

    parts: ClassVar[tuple[str, ...]] = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
    markers: ClassVar[tuple[str, ...]] = ("_weight_qdata",)
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: QuantConfig):
        kinds = config.at("quant_type")
        for name in kinds if isinstance(kinds, Mapping) and kinds else ("default",):
            config.choice(f"quant_type.{name}._type", KINDS)

    def floats(self, module: Module) -> Tensor:
        codes = module.matrix("_weight_qdata", torch.int8)
        scales = module.tensor("_weight_scale")
        num_outputs, num_inputs = codes.shape
        if scales.dim() != 2 or len(scales) != num_outputs or num_inputs % scales.shape[1]:
            raise module.error("_weight_scale", f"has shape {list(scales.shape)}, for a weight {list(codes.shape)}")
        zeros: Tensor | float = 0.0
        if "_weight_zero_point" in module.suffixes:
            zeros = module.tensor("_weight_zero_point", (num_outputs, scales.shape[1])).t()
        return grouped(codes.t(), zeros, scales.t(), in_order(num_inputs, num_inputs // scales.shape[1]))
