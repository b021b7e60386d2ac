"""Built-in attention backends."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import Component, hookimpl


@hookimpl
def provide_attentions() -> Iterable[Component]:
    yield Component(
        "torch_sdpa",
        "plugins.attention.torch_sdpa:TorchSdpa",
        "torch scaled-dot-product attention over gathered blocks, on any device",
        settings="plugins.attention.settings:TorchSdpaSettings",
    )
