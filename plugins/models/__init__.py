"""Built-in models beside the native decoder."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl
from core.model.block_formats import READABLE_WEIGHTS

NONET_API = API_VERSION


@hookimpl
def provide_models() -> Iterable[Component]:
    yield Component(
        "transformers",
        "plugins.models.transformers_model:TransformersModel",
        "any decoder-only transformers model, on the paged KV cache",
        settings="plugins.models.settings:TransformersSettings",
        provides=("window_groups",),
        accepts={
            "file_kind": ("gguf", "hf"),
            "weights": READABLE_WEIGHTS,
            "dtype": ("float32", "bfloat16", "float16"),
        },
    )
