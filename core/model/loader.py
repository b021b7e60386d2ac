"""Weights into layers: merges, checks shapes, accounts for every tensor of the file, and keeps one copy of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.errors import ModelFileError
from core.model.interface import BlockQuantMethod, Linear, ModelContext
from core.model.weights import BlockWeight, WeightSource

_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")  # buffers that old checkpoints carry


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A matrix of the checkpoint that becomes rows of a merged one."""

    name: str  # Hugging Face module name, without .weight
    rows: int


class Loader(Protocol):
    """Where a decoder's layers get their weights; `WeightLoader` is the one that reads the model's files."""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor: ...

    def linear(
        self, name: str, parts: Sequence[WeightPart], in_features: int, bias: bool, tied: Tensor | None = None
    ) -> Linear: ...

    def finish(self, tied_embeddings: bool) -> None: ...


class WeightLoader:
    """Reads a model's tensors from `source`, one at a time, straight to the model's dtype and device."""

    def __init__(self, source: WeightSource, context: ModelContext):
        self._source = source
        self._context = context
        self._unread = set(source.names())
        self._total = len(self._unread)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the model's device. Raises ModelFileError when it is missing or of another shape."""
        tensor = self._source.read(name, dtype or self._context.dtype)
        self._count(name, tuple(tensor.shape), shape)
        return tensor.to(self._context.device)

    def _count(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelFileError(
                f"{self._source.location}: tensor {name}: shape {list(found)}, the config asks for {list(shape)}"
            )
        self._unread.discard(name)
        self._context.progress("weights", self._total - len(self._unread), self._total)

    def linear(
        self, name: str, parts: Sequence[WeightPart], in_features: int, bias: bool, tied: Tensor | None = None
    ) -> Linear:
        """One matmul over the rows of all `parts`, in order; `name` is what the quant method knows it by. `tied`: the weight,
        where it is a tensor that the model has already.
        """
        biases = (
            self._merged([f"{part.name}.bias" for part in parts], [(part.rows,) for part in parts]) if bias else None
        )
        names, shapes = [f"{part.name}.weight" for part in parts], [(part.rows, in_features) for part in parts]
        quant = self._context.quant
        if isinstance(quant, BlockQuantMethod) and (blocks := self._blocks(quant, name, names, shapes)):
            return quant.block_linear(name, blocks, biases)
        weight = self._merged(names, shapes) if tied is None else tied
        return quant.linear(name, weight, biases)

    def _blocks(
        self, quant: BlockQuantMethod, name: str, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[BlockWeight]:
        """The weights as the file has them, where the quant method takes them so; else none."""
        found = [self._source.blocks(each) for each in names]
        blocks = [each for each in found if each is not None]
        if len(blocks) < len(names) or not quant.takes_blocks(name, [each.block_format.name for each in blocks]):
            return []
        for each, block, shape in zip(names, blocks, shapes, strict=True):
            columns = block.data.shape[1] // block.block_format.block_bytes * block.block_format.block_size
            self._count(each, (len(block.data), columns), shape)
        return blocks

    def _merged(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        if len(names) == 1:
            return self.tensor(names[0], shapes[0])
        rows = sum(shape[0] for shape in shapes)
        merged = torch.empty((rows, *shapes[0][1:]), dtype=self._context.dtype, device=self._context.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            merged[start : start + shape[0]] = self.tensor(name, shape)
            start += shape[0]
        return merged

    def finish(self, tied_embeddings: bool) -> None:
        """Raises ModelFileError when the file holds weights that no layer read: the config would not describe it."""
        self._context.progress("weights", self._total, self._total)
        unread = {name for name in self._unread if not name.endswith(_NOT_WEIGHTS)}
        if tied_embeddings:
            unread.discard("lm_head.weight")
        if unread:
            shown = ", ".join(sorted(unread)[:4])
            raise ModelFileError(
                f"{self._source.location}: {len(unread)} tensors have no place in the model that the config describes "
                f"({shown}{', …' if len(unread) > 4 else ''}); use model=transformers"
            )
