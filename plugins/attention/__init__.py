"""Built-in attention backends."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_attentions() -> Iterable[Component]:
    yield Component(
        "torch_sdpa",
        "plugins.attention.torch_sdpa:TorchSdpa",
        "torch scaled-dot-product attention over gathered blocks, on any device",
        settings="plugins.attention.settings:TorchSdpaSettings",
        provides=("sliding_window", "softcap", "window_groups", "blocks_first"),
        accepts={"device": ("cpu", "cuda"), "kv_dtype": ("float32", "bfloat16", "float16")},
    )
