"""The parts of a decoder layer, built from a `LayerPlan`.

The residual stream, norms and RoPE are float32; matmuls and attention run in the model's dtype. Plain objects, not
`nn.Module`: nothing is trained, and a call costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.arch import Activation, Architecture, LayerPlan
from core.model.interface import AttentionBackend, AttentionSpec, ModelContext
from core.model.loader import Loader, WeightPart
from core.model.rope import Rotation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class RMSNorm:
    """Root mean square norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight  # float32 [size], any offset already added
        self._shape = (weight.shape[0],)
        self.eps = eps

    @classmethod
    def load(cls, loader: Loader, name: str, arch: Architecture) -> RMSNorm:
        weight = loader.tensor(f"{name}.weight", (arch.hidden_size,), torch.float32)
        return cls(weight + arch.norm_offset, arch.norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Any float dtype in, float32 out."""
        return F.rms_norm(x.float(), self._shape, self.weight, self.eps)


class HeadNorm:
    """RMSNorm over each head of q and k in one pass: they lie side by side and differ only in their weights."""

    def __init__(self, loader: Loader, name: str, spec: AttentionSpec, arch: Architecture):
        q, k = (
            loader.tensor(f"{name}.{which}_norm.weight", (spec.head_dim,), torch.float32) + arch.norm_offset
            for which in "qk"
        )
        self.q, self.k = q, k  # float32 [head_dim]
        self._weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        self._shape = (spec.head_dim,)
        self.eps = arch.norm_eps

    def __call__(self, qk: Tensor) -> Tensor:
        """float32 [T, num_heads + num_kv_heads, head_dim], the same back."""
        return F.rms_norm(qk, self._shape, None, self.eps) * self._weight


class Attention:
    """Projections, head norms and RoPE around the attention backend."""

    def __init__(self, plan: LayerPlan, arch: Architecture, loader: Loader, context: ModelContext):
        spec, name = plan.attention, f"{plan.name}.self_attn"
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        parts = tuple(WeightPart(f"{name}.{projection}", count) for projection, count in rows.items())
        self.spec = spec
        self.qkv = loader.linear(f"{name}.qkv_proj", parts, arch.hidden_size, plan.qkv_bias)
        out = (WeightPart(f"{name}.o_proj", arch.hidden_size),)
        self.out = loader.linear(f"{name}.o_proj", out, q_rows, plan.output_bias)
        self.head_norm = HeadNorm(loader, name, spec, arch) if plan.qk_norm else None
        self._backend: AttentionBackend = context.attention
        self._heads = spec.num_heads + 2 * spec.num_kv_heads

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: Tensor, metadata: Any) -> Tensor:
        """x [T, hidden] in the model's dtype, the same back."""
        spec = self.spec
        qkv = self.qkv(x).view(-1, self._heads, spec.head_dim)
        qk = qkv[:, : -spec.num_kv_heads].float()
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotation.apply(qk).to(x.dtype)
        v = qkv[:, -spec.num_kv_heads :]
        out = self._backend.forward(spec, qk[:, : spec.num_heads], qk[:, spec.num_heads :], v, kv_cache, metadata)
        return self.out(out.reshape(x.shape[0], -1))


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one matmul (GLU variants: Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, plan: LayerPlan, arch: Architecture, loader: Loader):
        name, width = f"{plan.name}.mlp", plan.intermediate_size
        parts = (WeightPart(f"{name}.gate_proj", width), WeightPart(f"{name}.up_proj", width))
        self.gate_up = loader.linear(f"{name}.gate_up_proj", parts, arch.hidden_size, plan.mlp_bias)
        self.down = loader.linear(
            f"{name}.down_proj", (WeightPart(f"{name}.down_proj", arch.hidden_size),), width, plan.mlp_bias
        )
        self._activation = ACTIVATIONS[plan.activation]
        self._width = width

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        return self.down(self._activation(gate_up[:, : self._width]) * gate_up[:, self._width :])


class DecoderLayer:
    """Attention and MLP, each added to the residual stream, with norms where the plan puts them."""

    def __init__(self, plan: LayerPlan, arch: Architecture, loader: Loader, context: ModelContext):
        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(loader, f"{plan.name}.{name}", arch)

        self.rope = plan.rope
        self._dtype = context.dtype
        self.before_attention = norm("input_layernorm")
        self.attention = Attention(plan, arch, loader, context)
        sandwich = plan.norms == "sandwich"
        self.after_attention = norm("post_attention_layernorm") if sandwich else None
        # In the pre-norm families the checkpoint's "post attention" norm is the one before the MLP.
        self.before_mlp = norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        self.mlp = GatedMLP(plan, arch, loader)
        self.after_mlp = norm("post_feedforward_layernorm") if sandwich else None

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: Tensor, metadata: Any) -> Tensor:
        """x float32 [T, hidden], the residual stream, and the same back."""
        mixed = self.attention(self.before_attention(x).to(self._dtype), rotation, kv_cache, metadata)
        x = x + (mixed if self.after_attention is None else self.after_attention(mixed))
        mixed = self.mlp(self.before_mlp(x).to(self._dtype))
        return x + (mixed if self.after_mlp is None else self.after_mlp(mixed))
