"""Layers that share KV tensors: a group of layers has its own block tables, and all groups are of one size.

The k-th tensor of the pool serves the k-th layer of every group: block ids are unique across groups, so no two layers ever
write to one place. In a model with five sliding layers to a full one, a block then belongs to a few layers, and those of
sliding layers are given back when their tokens have left the window (idea: vLLM V1's hybrid KV cache groups). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.model.interface import AttentionSpec

MAX_GROUPS = 16  # each has a table per request
MAX_PADDING = 0.15  # places of a block that belong to no layer, by layers


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """`windows[0]` is None unless there is one group alone. Tensors are numbered from 0."""

    windows: tuple[int | None, ...]  # of each group: tokens that a token sees, itself included; None: all before it
    group_of: tuple[int, ...]  # layer -> its group
    tensor_of: tuple[int, ...]  # layer -> the KV tensor that it shares

    @classmethod
    def alone(cls, num_layers: int) -> LayerGroups:
        """One group, and a tensor for each layer."""
        return cls((None,), (0,) * num_layers, tuple(range(num_layers)))

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec], kv_shape: Callable[[AttentionSpec], tuple[int, ...]]) -> LayerGroups:
        """Full layers first, then the layers of each window in groups of the same size, the last one padded.

        One group alone where that would save nothing: no layer slides, or all do; the layers' caches differ in shape; there
        are more full layers than sliding ones, or far more places than layers.
        """
        alone = cls.alone(len(specs))
        full = [spec.layer for spec in specs if spec.sliding_window is None]
        if not full or not _are_alike(specs, kv_shape):
            return alone
        groups: list[tuple[int | None, tuple[int, ...]]] = [(None, tuple(full))]
        for window in sorted({spec.sliding_window for spec in specs if spec.sliding_window is not None}):
            layers = [spec.layer for spec in specs if spec.sliding_window == window]
            groups += [(window, tuple(layers[at : at + len(full)])) for at in range(0, len(layers), len(full))]
        num_places = len(groups) * len(full)
        if not 1 < len(groups) <= MAX_GROUPS or num_places > (1 + MAX_PADDING) * len(specs):
            return alone
        places = {
            layer: (group, place) for group, (_, members) in enumerate(groups) for place, layer in enumerate(members)
        }
        group_of, tensor_of = zip(*(places[spec.layer] for spec in specs), strict=True)
        return cls(tuple(window for window, _ in groups), group_of, tensor_of)

    @property
    def num_tensors(self) -> int:
        return 1 + max(self.tensor_of, default=-1)


def _are_alike(specs: Sequence[AttentionSpec], kv_shape: Callable[[AttentionSpec], tuple[int, ...]]) -> bool:
    """One KV tensor would do for any of them, and `layer` numbers them."""
    numbered = [spec.layer for spec in specs] == list(range(len(specs)))
    return numbered and len({(spec.num_kv_heads, spec.head_dim, *kv_shape(spec)) for spec in specs}) == 1
