"""The attention function that transformers models call, and what a model tells about its attention through that call.

transformers' attention interface (its docs, "Attention interface") dispatches every attention layer of a model by the
name in its config. Ours is `nonet_paged`: it hands q, k and v to the engine's attention backend and its paged KV cache.
The step in progress lies in a `StepSlot` that the attention layers of one model share. (Keyword arguments of the model's
forward would do as well, but several families do not pass them down to their layers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from core.errors import GenerationError, PluginError
from core.model.interface import AttentionBackend, AttentionSpec

NAME = "nonet_paged"
_SLOT = "nonet_slot"  # attribute of each attention layer
_FULL, _UNSUPPORTED = 0, -1  # what a mask marker holds beside a window
_FAR = 1 << 20  # a position past any sliding window
# Keywords of attention calls that change nothing here: RoPE is applied before the call, and there is no dropout.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "is_causal",
    }
)


class Step(Protocol):
    """One forward pass as the attention layers see it."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns [T, num_heads, head_dim]."""
        ...


@dataclass(slots=True)
class StepSlot:
    """Where the attention layers of one model find the step in progress. One forward pass at a time."""

    step: Step | None = None

    def attach(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self)

    @contextmanager
    def during(self, step: Step) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention layer asked for."""

    module: torch.nn.Module
    q: torch.Tensor  # [T, num_heads, head_dim]
    k: torch.Tensor  # [T, num_kv_heads, head_dim]
    v: torch.Tensor  # [T, num_kv_heads, head_dim]
    mask: torch.Tensor | None
    scale: float
    options: Mapping[str, Any]  # the other keywords of the call

    @property
    def layer(self) -> int:
        index = self.module.layer_idx
        if not isinstance(index, int):
            raise PluginError(f"{type(self.module).__name__}.layer_idx is {index!r}; it must be the layer's number")
        return index


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Registered with transformers; returns [1, T, num_heads, head_dim]."""
    slot: StepSlot | None = getattr(module, _SLOT, None)
    if slot is None or slot.step is None:
        raise PluginError(f"{type(module).__name__} has no layer_idx, so its KV cache cannot be told from the others")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    return slot.step.attend(AttentionCall(module, q, k, v, attention_mask, scale, options))[None], None


def mask_marker(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    """Instead of a mask, its kind: int64 [1, 1, 1, 1] with 0 (causal), a sliding window, or -1 (anything else).

    Runs only while a model is probed: a step passes a mask of four dimensions, which transformers takes as it is.
    """
    return torch.tensor(_mask_kind(mask_function)).view(1, 1, 1, 1)


def _mask_kind(mask_function: Callable[..., torch.Tensor]) -> int:
    def sees(query: int, key: int) -> bool:
        ids = (torch.tensor(value) for value in (0, 0, query, key))
        return bool(mask_function(*ids))

    def window(query: int) -> int:
        """How many positions `query` sees, itself included; `query + 1` when there is no bound."""
        low, high = 0, query + 1  # sees at least `low`, at most `high`
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sees(query, query - middle + 1) else (low, middle - 1)
        return low

    if sees(0, 1) or not sees(_FAR, _FAR):
        return _UNSUPPORTED
    if sees(_FAR, 0):
        return _FULL
    # a chunked mask sees more or less of the past from one position to the next, a sliding one always the same
    return window(_FAR) if window(_FAR) == window(_FAR + 1) else _UNSUPPORTED


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention over the KV cache of this batch. Layers are checked against what the probe saw."""

    attention: AttentionBackend
    specs: Sequence[AttentionSpec]
    kv_caches: Sequence[torch.Tensor]
    metadata: Any

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec = self.specs[call.layer]
        if abs(call.scale - spec.scale) > 1e-6 * abs(spec.scale):
            raise GenerationError(
                f"layer {call.layer} ({type(call.module).__name__}): asks for scale {call.scale}, was built with "
                f"{spec.scale}; this model changes its attention while it runs: use another model plugin"
            )
        return self.attention.forward(spec, call.q, call.k, call.v, self.kv_caches[spec.layer], self.metadata)


@dataclass(slots=True)
class Probe:
    """Notes what each layer asks for, in one tiny forward pass before anything is generated."""

    seen: dict[int, AttentionSpec] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        name = type(call.module).__name__
        if call.layer in self.seen:
            raise PluginError(f"layer {call.layer} ({name}) attends more than once in a forward pass")
        _refuse_unknown(call, name)
        self.seen[call.layer] = _spec(call, name)
        return call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1)


def _refuse_unknown(call: AttentionCall, name: str) -> None:
    """Tensors that enter the scores (sinks, biases) would change the result if they were left out."""
    for option, value in call.options.items():
        if option not in _HARMLESS and isinstance(value, torch.Tensor):
            raise PluginError(f"{name} gives its attention function {option!r}, which paged attention does not apply")
    causal = call.options.get("is_causal")
    if causal is False or (causal is None and not getattr(call.module, "is_causal", True)):
        raise PluginError(f"{name} attends in both directions; only causal decoders generate")
    if call.v.shape[-1] != call.q.shape[-1]:
        raise PluginError(f"{name} has values of {call.v.shape[-1]} and keys of {call.q.shape[-1]}; they must be equal")


def _spec(call: AttentionCall, name: str) -> AttentionSpec:
    return AttentionSpec(
        layer=call.layer,
        num_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[2],
        scale=call.scale,
        sliding_window=_window(call, name),
        softcap=call.options.get("softcap"),
    )


def _window(call: AttentionCall, name: str) -> int | None:
    """The mask is what counts in transformers' own attention; the keyword only where a model builds no mask."""
    if call.mask is None:
        window = call.options.get("sliding_window")
        return int(window) if window else None
    if call.mask.dtype != torch.int64 or call.mask.numel() != 1 or int(call.mask) == _UNSUPPORTED:
        raise PluginError(f"{name} uses a mask that is neither causal nor a sliding window (chunks, ALiBi, prefix …)")
    return int(call.mask) or None


def register() -> None:
    """Make `nonet_paged` known to transformers; may be called again."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, mask_marker)
