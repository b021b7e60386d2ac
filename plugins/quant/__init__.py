"""Built-in weight formats."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_quants() -> Iterable[Component]:
    yield Component(
        "none",
        "plugins.quant.none:Dense",
        "weights in the model's dtype",
        settings="plugins.quant.settings:DenseSettings",
    )
