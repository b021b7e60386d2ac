"""The stages' own defaults, registered through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import Component, hookimpl


@hookimpl
def provide_renderers() -> Iterable[Component]:
    yield Component("text", "core.stages.text_renderer:Text", "chat template and tokenizer")
    yield Component("token_ids", "core.stages.text_renderer:TokenIds", "prompts are token ids only")


@hookimpl
def provide_admissions() -> Iterable[Component]:
    yield Component("open", "core.stages.admission:Open", "context and field checks, no queue bound")
    yield Component("load_aware", "core.stages.admission:LoadAware", "bounded queue: 503 with Retry-After past it")


@hookimpl
def provide_prefills() -> Iterable[Component]:
    yield Component("chunked", "core.stages.prefill:Chunked", "prompts in chunks of 512 tokens, mixed with decodes")
    yield Component("whole", "core.stages.prefill:Whole", "a prompt in one forward pass")


@hookimpl
def provide_decodes() -> Iterable[Component]:
    yield Component("plain", "core.stages.decode:Plain", "one token per request per step")


@hookimpl
def provide_detokenizers() -> Iterable[Component]:
    yield Component("incremental", "core.stages.incremental:Incremental", "decode only what is new; stop strings")


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
    )


@hookimpl
def provide_caches() -> Iterable[Component]:
    yield Component("paged", "core.cache.paged:PagedCache", "fixed-size blocks with a shared-prefix cache")


@hookimpl
def provide_executors() -> Iterable[Component]:
    yield Component(
        "local",
        "core.model.local_executor:LocalExecutor",
        "model and sampler in the engine's own process",
        settings="core.model.model_settings:LocalExecutorSettings",
    )
