"""Settings and plugins -> pipeline: the one place where names become objects. Nothing here runs inside a step.

`describe` selects and checks everything without heavy imports; `build_front` and `build_engine` make the two halves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel

from core.cache.kv_cache import CacheContext, CacheSettings, KVCache
from core.errors import ConfigError, NonetError, PluginError, RequestError
from core.hookspecs import GROUPS
from core.model.interface import Executor, ExecutorContext
from core.pipeline import EnginePipeline, FrontPipeline, Part, PipelineDescription
from core.plugins import Plugins, Provided, import_target, load_plugins
from core.progress import Progress, no_progress
from core.settings import MODEL_KEYS, Settings, validated
from core.stages.admission import Admission, AdmissionContext
from core.stages.completion import Completion, CompletionContext
from core.stages.decode import Decode, DecodeContext
from core.stages.detokenizer import Detokenizer, DetokenizerContext
from core.stages.frontend import Frontend, FrontendContext
from core.stages.prefill import Prefill, PrefillContext
from core.stages.renderer import Renderer, RendererContext
from core.stages.sampler import SamplerContext, unsupported_fields
from core.stages.scheduler import Scheduler, SchedulerContext, SchedulerSettings

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer
    from core.request import SamplingParams
    from core.step_loop import EngineLoop

S = TypeVar("S", bound=BaseModel)


def describe(settings: Settings, plugins: Plugins) -> PipelineDescription:
    """Select a component per group and check its values. Raises ConfigError or PluginError; reads no model."""
    return PipelineDescription(tuple(_part(settings, plugins, group) for group in GROUPS))


def _part(settings: Settings, plugins: Plugins, group: str) -> Part:
    selected = settings.groups[group]
    provided = plugins.find(group, selected.name)
    cls = _settings_class(provided)
    return Part(group, provided, validated(cls, selected.values, group, also=MODEL_KEYS if group == "model" else ()))


def _settings_class(provided: Provided) -> type[BaseModel]:
    if provided.component.settings is not None:
        return cast(type[BaseModel], import_target(provided, provided.component.settings))
    cls = getattr(import_target(provided, provided.component.target), "Settings", None)
    if not (isinstance(cls, type) and issubclass(cls, BaseModel)):
        raise PluginError(
            f"{provided.component.target} (plugin {provided.plugin.name}) has no nested pydantic `Settings` class"
        )
    return cls


def build(part: Part, context: object) -> Any:
    """`Class(settings, context)`. Raises PluginError naming plugin, wheel and cause; our own errors pass as they are."""
    cls = import_target(part.provided, part.provided.component.target)
    try:
        return cls(part.settings, context)
    except NonetError:
        raise
    except Exception as error:
        where = f"{part.group}={part.provided.component.name} (plugin {part.provided.plugin.name}, {part.wheel})"
        raise PluginError(f"{where} could not be built: {type(error).__name__}: {error}") from error


def read_model(
    settings: Settings, progress: Progress = no_progress, known_model_types: Container[str] | None = None
) -> ModelSpec:
    """Find the model's files (downloading where the source says so) and read its description; no weights, no torch.

    `known_model_types`: see `core.model.describe.read_spec`.
    """
    from core.model.describe import read_spec
    from core.model.sources import default_cache_dir, resolve

    cache_dir = Path(settings.model.cache_dir) if settings.model.cache_dir else default_cache_dir()
    files = resolve(settings.model.source, cache_dir=cache_dir, progress=progress)
    return read_spec(files, max_model_len=settings.model.max_model_len, known_model_types=known_model_types)


def build_front(
    description: PipelineDescription,
    settings: Settings,
    plugins: Plugins,
    spec: ModelSpec,
    num_kv_slots: Callable[[], int],
    tokenizer: Tokenizer | None = None,
) -> FrontPipeline:
    """Stages 2, 3 and 8. The tokenizer is loaded here where it is not given."""
    from core.model.tokenizer import load_tokenizer

    tokenizer = tokenizer or load_tokenizer(spec.files)
    renderer: Renderer = build(description.part("renderer"), RendererContext(spec, tokenizer))
    admission: Admission = build(description.part("admission"), AdmissionContext(spec, time.monotonic, num_kv_slots))
    detokenizer: Detokenizer = build(description.part("detokenizer"), DetokenizerContext(tokenizer))
    return FrontPipeline(
        model=spec,
        renderer=renderer,
        admission=admission,
        detokenizer=detokenizer,
        check_fields=partial(_check_fields, description.part("sampler"), plugins.components("sampler")),
        step_observers=plugins.observers("step_finished", settings.plugins.enable),
        request_observers=plugins.observers("request_finished", settings.plugins.enable),
    )


def _check_fields(sampler: Part, known: Sequence[Provided], params: SamplingParams) -> None:
    """Nothing is silently ignored: a field that the selected sampler does not honour is refused, naming one that does."""
    component = sampler.provided.component
    for field in unsupported_fields(params, component.provides):
        able = sorted(p.component.name for p in known if field in p.component.provides)
        hint = f"; serve with sampler={' or sampler='.join(able)} for it" if able else ""
        raise RequestError(
            f"{field} is not supported by sampler={component.name}{hint}", param=field, code="unsupported"
        )


def build_frontend(description: PipelineDescription, context: FrontendContext) -> Frontend:
    """Stage 1."""
    return cast(Frontend, build(description.part("frontend"), context))


def build_engine(
    description: PipelineDescription, settings: Settings, spec: ModelSpec, progress: Progress = no_progress
) -> EnginePipeline:
    """Stages 4 to 7 and 9, with the model loaded and the KV pool allocated."""
    from core.batching import BatchBuilder

    limits = _settings_of(description, "scheduler", SchedulerSettings)
    pool = _settings_of(description, "cache", CacheSettings)
    executor = _build_executor(description, settings, spec, progress)
    num_blocks = _allocate(pool, executor, spec, limits.max_num_running_reqs)
    cache: KVCache = build(description.part("cache"), CacheContext(num_blocks, spec.max_model_len))
    prefill: Prefill = build(description.part("prefill"), PrefillContext(limits.max_num_scheduled_tokens))
    decode: Decode = build(description.part("decode"), DecodeContext(spec.max_model_len))
    context = SchedulerContext(cache, prefill, decode, time.monotonic, spec.max_model_len)
    scheduler: Scheduler = build(description.part("scheduler"), context)
    completion: Completion = build(description.part("completion"), CompletionContext(spec))
    return EnginePipeline(
        model=spec,
        scheduler=scheduler,
        prefill=prefill,
        decode=decode,
        batch_builder=BatchBuilder(cache.block_size, spec.max_model_len),
        executor=executor,
        completion=completion,
        cache=cache,
        clock=time.monotonic,
    )


def _settings_of(description: PipelineDescription, group: str, base: type[S]) -> S:
    """The settings of a component as the pipeline knows them. Raises PluginError where they do not extend `base`."""
    part = description.part(group)
    if not isinstance(part.settings, base):
        raise PluginError(
            f"{group}={part.provided.component.name} (plugin {part.provided.plugin.name}): "
            f"its Settings must extend {base.__module__}.{base.__qualname__}"
        )
    return part.settings


def _build_executor(
    description: PipelineDescription, settings: Settings, spec: ModelSpec, progress: Progress
) -> Executor:
    limits = _settings_of(description, "scheduler", SchedulerSettings)
    context = ExecutorContext(
        spec=spec,
        build_model=partial(build, description.part("model")),
        build_attention=partial(build, description.part("attention")),
        build_quant=partial(build, description.part("quant")),
        build_sampler=lambda device: build(description.part("sampler"), SamplerContext(spec, device)),
        dtype=settings.model.dtype,
        device=settings.model.device,
        block_size=_settings_of(description, "cache", CacheSettings).block_size,
        max_num_scheduled_tokens=limits.max_num_scheduled_tokens,
        max_num_running_reqs=limits.max_num_running_reqs,
        progress=progress,
    )
    return cast(Executor, build(description.part("executor"), context))


def _allocate(settings: CacheSettings, executor: Executor, spec: ModelSpec, max_running: int) -> int:
    """Size the KV pool: what config says, else a share of what is free where it will lie, never more than can be used."""
    num_blocks = settings.num_blocks
    if num_blocks is None:
        block_bytes = executor.kv_bytes_per_block()
        budget = settings.memory_bytes(executor.free_memory())
        num_blocks = min(budget // block_bytes, -(-spec.max_model_len // settings.block_size) * max_running)
        if num_blocks < 1:
            raise ConfigError(
                f"cache.memory={settings.memory} ({budget} bytes) does not hold one KV block of {block_bytes} bytes; "
                "raise cache.memory"
            )
    executor.allocate(num_blocks)
    return num_blocks


def build_engine_from_json(settings_json: str, progress: Progress = no_progress) -> EngineLoop:
    """The engine process's start: the same settings and the same plugins as the front's."""
    settings = Settings.from_json(settings_json)
    plugins = load_plugins(settings.plugins.disable)
    return make_engine(settings, plugins, progress)


def make_engine(
    settings: Settings, plugins: Plugins, progress: Progress = no_progress, spec: ModelSpec | None = None
) -> EngineLoop:
    """The engine, its model loaded. The model is found and described here where `spec` is not given."""
    from core.engine import Engine
    from core.wire import EngineInfo

    description = describe(settings, plugins)
    spec = spec or read_model(settings, progress)
    pipeline = build_engine(description, settings, spec, progress)
    info = EngineInfo(
        num_kv_blocks=pipeline.cache.num_blocks,
        block_size=pipeline.cache.block_size,
        max_model_len=spec.max_model_len,
        model_name=spec.name,
        dtype=pipeline.executor.dtype,
        device=pipeline.executor.device,
        plugins=plugins.fingerprint(),
    )
    return Engine(pipeline, info)
