"""The native CPU runtime: a model that runs a whole step in one call, its attention and its weight formats.

Each also goes with the torch layers (`model=native`), and there is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl
from core.model.block_formats import QUANTIZED_CHECKPOINTS, READABLE_WEIGHTS
from core.model.families import FAMILIES

NONET_API = API_VERSION

FORMATS = {
    "cpu_float32": ("Float32", "weights in float32"),
    "cpu_bf16": ("Bfloat16", "weights in bfloat16"),
    "cpu_int8": (
        "Int8",
        "8-bit weights in groups of 32, the head with a scale for each output; activations likewise in groups",
    ),
    "cpu_int4": ("Int4", "4-bit weights in groups of 32, the head in 8 bits; 8-bit activations in groups of 32"),
    "cpu_gguf": ("Gguf", "the 4-bit blocks of a GGUF file as they are, all others in 8 bits; activations as cpu_int4"),
}


@hookimpl
def provide_models() -> Iterable[Component]:
    yield Component(
        "cpu",
        "plugins.cpu.model:CpuModel",
        "the native decoder's families, a whole step in one call of compiled code",
        settings="plugins.cpu.settings:CpuModelSettings",
        provides=("window_groups",),
        requires=("attention.cpu_blocks", "quant.cpu_tiles"),
        accepts={
            "device": ("cpu",),
            "file_kind": ("gguf", "hf"),
            "model_type": tuple(FAMILIES),
            "weights": (*READABLE_WEIGHTS, *QUANTIZED_CHECKPOINTS),
            "dtype": ("float32", "bfloat16"),
        },
    )


@hookimpl
def provide_attentions() -> Iterable[Component]:
    yield Component(
        "cpu_paged",
        "plugins.cpu.attention:CpuPaged",
        "paged attention in compiled code, over blocks laid out for dot products",
        settings="plugins.cpu.settings:CpuAttentionSettings",
        provides=("sliding_window", "softcap", "window_groups", "blocks_first", "cpu_blocks"),
        accepts={"device": ("cpu",), "kv_dtype": ("float32", "bfloat16")},
    )


@hookimpl
def provide_quants() -> Iterable[Component]:
    for name, (target, summary) in FORMATS.items():
        yield Component(
            name,
            f"plugins.cpu.quant:{target}",
            summary,
            settings="plugins.cpu.settings:CpuQuantSettings",
            provides=("cpu_tiles",),
            accepts={"device": ("cpu",)},
        )
