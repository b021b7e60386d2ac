"""A quantized checkpoint as a source of weights: each matrix whole, in floating point, under its own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from core.errors import ModelFileError, near_matches, shown
from core.model.quantized.awq import Awq
from core.model.quantized.bitsandbytes import BitsAndBytes
from core.model.quantized.compressed_tensors import CompressedTensors
from core.model.quantized.fp8 import Fp8
from core.model.quantized.gptq import Gptq
from core.model.quantized.scheme import SECTION, Module, QuantConfig, Scheme
from core.model.quantized.torchao import TorchAo

SCHEMES: Mapping[str, Callable[[QuantConfig], Scheme]] = MappingProxyType(
    {
        "awq": Awq,
        "gptq": Gptq,
        "compressed-tensors": CompressedTensors,
        "fp8": Fp8,
        "bitsandbytes": BitsAndBytes,
        "torchao": TorchAo,
    }
)
"""`quant_method` -> what reads it."""


def scheme_of(values: object, location: str) -> Scheme:
    """`values`: quantization_config. Raises ModelFileError naming the key that is not read."""
    if not isinstance(values, Mapping):
        raise ModelFileError(f"{location}: {SECTION}: {shown(values)} is no table of keys")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise ModelFileError(
            f"{location}: {SECTION}.quant_method={shown(method)}: is not read{near_matches(str(method), SCHEMES)}"
        )
    return SCHEMES[method](QuantConfig(values, location))


class StoredWeights(Protocol):
    """Tensors of a checkpoint: `core.model.weights.SafetensorsWeights`."""

    @property
    def location(self) -> str: ...

    def names(self) -> Set[str]: ...

    def stored(self, name: str) -> Tensor:
        """In the file's own dtype."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One that holds floating-point numbers."""
        ...


class QuantizedWeights:
    """See `core.model.weights.WeightSource`. `files` also reads what is not quantized."""

    def __init__(self, files: StoredWeights, scheme: Scheme):
        self.location, stored = files.location, files.names()
        self._scheme = scheme
        self._files = files
        parts = _parts(scheme, stored)
        self._modules = {
            f"{name}.weight": Module(name, files.location, frozenset(suffixes), files.stored)
            for name, suffixes in parts.items()
            if any(marker in suffixes for marker in scheme.markers)
        }
        taken = {f"{module.name}.{suffix}" for module in self._modules.values() for suffix in module.suffixes}
        plain = (name for name in stored - taken if not name.endswith(tuple(f".{suffix}" for suffix in scheme.unused)))
        self._plain = frozenset(plain)

    def names(self) -> Set[str]:
        return self._plain | self._modules.keys()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if (module := self._modules.get(name)) is not None:
            return self._scheme.floats(module).to(dtype)
        if name not in self._plain:
            raise ModelFileError(f"{self.location}: tensor {name}: not found{near_matches(name, self.names())}")
        return self._files.read(name, dtype)

    def blocks(self, name: str) -> None:
        return None


def _parts(scheme: Scheme, stored: Set[str]) -> dict[str, set[str]]:
    """Module -> the suffixes that it has, of those that the scheme knows."""
    found: dict[str, set[str]] = {}
    by_length = sorted(scheme.parts, key=len, reverse=True)
    for name in stored:
        suffix = next((suffix for suffix in by_length if name.endswith(f".{suffix}")), None)
        if suffix is not None:
            found.setdefault(name.removesuffix(f".{suffix}"), set()).add(suffix)
    return found
