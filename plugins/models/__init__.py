"""Built-in models beside the native decoder."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import Component, hookimpl


@hookimpl
def provide_models() -> Iterable[Component]:
    yield Component(
        "transformers",
        "plugins.models.transformers_model:TransformersModel",
        "any decoder-only transformers model, on the paged KV cache",
        settings="plugins.models.settings:TransformersSettings",
    )
