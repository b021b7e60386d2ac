"""What a way of quantizing is to the reader of a checkpoint: which tensors are parts of a matrix, and the matrix itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import regex
import torch
from torch import Tensor

from core.errors import ModelFileError, shown

SECTION = "quantization_config"


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """`quantization_config` of a config.json. Errors name the key."""

    values: Mapping[str, Any]
    location: str  # the config.json

    def refuse(self, key: str, why: str) -> ModelFileError:
        """To be raised."""
        return ModelFileError(f"{self.location}: {SECTION}.{key}={shown(self.at(key))}: {why}")

    def at(self, key: str) -> Any:
        """`key` may have dots."""
        found: Any = self.values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def choice(self, key: str, among: tuple[Any, ...], default: Any = None) -> Any:
        """Raises ModelFileError for a value that is not read."""
        value = default if self.at(key) is None else self.at(key)
        if value not in among or isinstance(value, bool) is not isinstance(among[0], bool):
            raise self.refuse(key, f"is not read; {', '.join(map(str, among))} are")
        return value

    def first(self, *keys: str) -> str:
        """The first key that there is: tools call some things differently. The first of all where there is none."""
        return next((key for key in keys if self.at(key) is not None), keys[0])

    def pattern(self, key: str, text: str) -> Callable[[str], bool]:
        """Whether names match `text`, from their beginning. Raises ModelFileError where it is none, or takes too long."""
        try:
            compiled = regex.compile(text)
        except regex.error as error:
            raise self.refuse(key, f"{text!r} is no pattern: {error}") from None

        def matches(name: str) -> bool:
            try:
                return compiled.match(name, timeout=1.0) is not None
            except TimeoutError:
                raise self.refuse(key, f"{text!r} takes too long") from None

        return matches

    def group_size(self, key: str = "group_size") -> int:
        """-1: all of the inputs are one group."""
        value = self.at(key)
        if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
            raise self.refuse(key, "is no size of a group (a number of inputs, or -1 for all)")
        return value


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the checkpoint and the tensors that it has, by what follows its name."""

    name: str
    location: str
    suffixes: Set[str]
    read: Callable[[str], Tensor]  # a tensor by its whole name

    def tensor(self, suffix: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As it is stored. Raises ModelFileError where it is missing, of another shape or of another dtype."""
        if suffix not in self.suffixes:
            raise self.error(suffix, "is missing")
        found = self.read(f"{self.name}.{suffix}")
        if shape is not None and tuple(found.shape) != shape:
            raise self.error(suffix, f"has shape {list(found.shape)}, the weight's other parts ask for {list(shape)}")
        if dtype is not None and found.dtype != dtype:
            raise self.error(suffix, f"holds {found.dtype}, not {dtype}")
        return found

    def matrix(self, suffix: str, dtype: torch.dtype) -> Tensor:
        """One with two axes."""
        found = self.tensor(suffix, dtype=dtype)
        if found.dim() != 2 or 0 in found.shape:
            raise self.error(suffix, f"has shape {list(found.shape)}, not that of a matrix")
        return found

    def error(self, suffix: str, why: str) -> ModelFileError:
        return ModelFileError(f"{self.location}: tensor {self.name}.{suffix}: {why}")


class Scheme(Protocol):
    """One `quant_method`. Made from the checkpoint's QuantConfig; raises ModelFileError for what it does not read."""

    parts: ClassVar[tuple[str, ...]]
    """What may follow the name of a quantized module: its `weight` is made of these."""
    markers: ClassVar[tuple[str, ...]]
    """Those of them that show that a module is quantized."""
    unused: ClassVar[tuple[str, ...]]
    """What may follow any name, and changes nothing here: scales of activations and of KV."""

    def floats(self, module: Module) -> Tensor:
        """float32 [out, in]. Raises ModelFileError naming the tensor."""
        ...


def grouped(codes: Tensor, zeros: Tensor | float, scales: Tensor, group_of: Tensor) -> Tensor:
    """(codes - zeros) * scales in float32: codes [in, out], zeros and scales [groups, out], group_of [in]. Returns [out, in]."""
    least = zeros.float()[group_of] if isinstance(zeros, Tensor) else zeros
    return ((codes.float() - least) * scales.float()[group_of]).t().contiguous()


def inputs_per_group(group_size: int, num_inputs: int) -> int:
    """`group_size` as a config has it."""
    return num_inputs if group_size == -1 else group_size


def in_order(num_inputs: int, size: int) -> Tensor:
    """The group of each input, where groups of `size` inputs follow each other."""
    return torch.arange(num_inputs) // size


def group_of(module: Module, suffix: str, num_inputs: int, size: int) -> Tensor:
    """int64 [in]: the group of each input, which act-order permutes. Raises ModelFileError for one that there is not."""
    if suffix not in module.suffixes:
        return in_order(num_inputs, size)
    found, num_groups = module.tensor(suffix, (num_inputs,)).long(), -(-num_inputs // size)
    if found.min() < 0 or found.max() >= num_groups:
        raise module.error(suffix, f"names group {int(found.max())}, there are {num_groups}")
    return found
