"""The stages' own defaults, registered through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl
from core.model.block_formats import QUANTIZED_CHECKPOINTS, READABLE_WEIGHTS
from core.model.families import FAMILIES

NONET_API = API_VERSION


@hookimpl
def provide_renderers() -> Iterable[Component]:
    yield Component(
        "text",
        "core.stages.text_renderer:Text",
        "chat template and tokenizer",
        provides=("messages", "text", "token_ids", "tools"),
        requires=("model.tokenizer",),
    )
    yield Component(
        "token_ids",
        "core.stages.text_renderer:TokenIds",
        "prompts are token ids only",
        provides=("token_ids",),
        requires=("model.tokenizer",),  # for bad_words and /detokenize
    )


@hookimpl
def provide_admissions() -> Iterable[Component]:
    yield Component("open", "core.stages.admission:Open", "context and field checks, no queue bound")
    yield Component(
        "load_aware",
        "core.stages.load_aware:LoadAware",
        "a queue that is bounded in requests, tokens, time and per tenant: 503 with Retry-After past it",
    )


@hookimpl
def provide_prefills() -> Iterable[Component]:
    yield Component("chunked", "core.stages.prefill:Chunked", "prompts in chunks of 512 tokens, mixed with decodes")
    yield Component("whole", "core.stages.prefill:Whole", "a prompt in one forward pass")


@hookimpl
def provide_decodes() -> Iterable[Component]:
    yield Component("plain", "core.stages.decode:Plain", "one token per request per step")


@hookimpl
def provide_detokenizers() -> Iterable[Component]:
    yield Component(
        "incremental",
        "core.stages.incremental:Incremental",
        "decode only what is new; stop strings",
        requires=("model.tokenizer",),
    )


@hookimpl
def provide_completions() -> Iterable[Component]:
    yield Component("standard", "core.stages.completion:Standard", "EOS, stop ids, length, repetition")


@hookimpl
def provide_models() -> Iterable[Component]:
    yield Component(
        "native",
        "core.model.decoder:NativeModel",
        "llama, mistral, qwen2, qwen3, gemma2, gemma3 from safetensors or GGUF",
        settings="core.model.model_settings:NativeSettings",
        provides=("window_groups",),
        accepts={
            "model_type": tuple(FAMILIES),
            "file_kind": ("gguf", "hf"),
            "weights": (*READABLE_WEIGHTS, *QUANTIZED_CHECKPOINTS),
            "dtype": ("float32", "bfloat16", "float16"),
        },
    )


@hookimpl
def provide_caches() -> Iterable[Component]:
    yield Component(
        "paged",
        "core.cache.paged:PagedCache",
        "fixed-size blocks with a shared-prefix cache",
        provides=("prefix_sharing", "swap", "window_groups"),
    )


@hookimpl
def provide_executors() -> Iterable[Component]:
    yield Component(
        "local",
        "core.model.local_executor:LocalExecutor",
        "model and sampler in the engine's own process",
        settings="core.model.model_settings:LocalExecutorSettings",
        provides=("history", "state", "swap", "window_groups"),
        accepts={"device": ("cpu", "cuda"), "dtype": ("float32", "bfloat16", "float16")},
    )


@hookimpl
def provide_tool_parsers() -> Iterable[Component]:
    yield Component("none", "core.stages.tool_parser:NoTools", "requests with tools are refused")


@hookimpl
def provide_reasoning_parsers() -> Iterable[Component]:
    yield Component("none", "core.stages.reasoning_parser:NoReasoning", "all text is content")


@hookimpl
def provide_predictors() -> Iterable[Component]:
    yield Component("max_tokens", "core.stages.predictor:MaxTokens", "the most that a request may have")


@hookimpl
def provide_observers() -> Iterable[Component]:
    yield Component("prometheus", "core.metrics:Metrics", "counters, gauges and histograms for GET /metrics")
