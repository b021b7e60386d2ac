"""Settings and plugins -> pipeline: the one place where names become objects. Nothing here runs inside a step.

`describe` selects and checks everything without heavy imports; `build_front` and `build_engine` make the two halves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel

from core.cache.kv_cache import CacheContext, CacheSettings, KVCache
from core.capabilities import check_composition, check_model, check_resolved
from core.components import CHAINS, GROUPS, Provided, import_target
from core.config.keys import Option, fields_of, validated
from core.errors import ConfigError, NonetError, PluginError, Terminated, described, shown
from core.front.request_fields import RequestFields, params_class
from core.grammar.figures import GrammarFigures
from core.grammar.setup import grammar_setup
from core.isolation.faults import Faults
from core.isolation.front import FrontLimits
from core.kv_layout import KVLayout, largest_step, read_layout, tell_of_kept_windows, wants_groups
from core.model.interface import AttentionBackend, AttentionContext, Executor, ExecutorContext
from core.observers import Named, ObserverContext, Observers
from core.pipeline import EnginePipeline, FrontPipeline, Part, PipelineDescription
from core.plugins import Plugins, load_plugins
from core.progress import Progress, no_progress
from core.settings import MODEL_KEYS, PluginSettings, Selection, Settings, settings_class
from core.stages.admission import Admission, AdmissionContext
from core.stages.completion import CompletionContext
from core.stages.decode import DecodeContext
from core.stages.detokenizer import Detokenizer, DetokenizerContext
from core.stages.frontend import Frontend, FrontendContext
from core.stages.predictor import PredictorContext
from core.stages.prefill import PrefillContext
from core.stages.reasoning_parser import NoReasoning, ReasoningParser, ReasoningParserContext
from core.stages.renderer import Renderer, RendererContext
from core.stages.scheduler import SchedulerSettings
from core.stages.tool_parser import NoTools, ToolParser, ToolParserContext

if TYPE_CHECKING:
    from core.border.step_loop import EngineLoop
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer

log = logging.getLogger("nonet.assembly")

S = TypeVar("S", bound=BaseModel)


def describe(settings: Settings, plugins: Plugins) -> PipelineDescription:
    """Select a component per group, check its values and whether all go together. Raises ConfigError or PluginError.

    Reads no model.
    """
    parts = [_part(settings, plugins, group, settings.groups[group]) for group in GROUPS]
    for chain in CHAINS:
        parts += chain_parts(settings, plugins, chain)
    description = PipelineDescription(tuple(parts))
    check_composition(description, settings, plugins)
    return description


def chain_parts(settings: Settings, plugins: Plugins, chain: str) -> list[Part]:
    """The members of one chain, checked each by itself."""
    return [_part(settings, plugins, chain, member) for member in settings.chains.get(chain, ())]


def _part(settings: Settings, plugins: Plugins, group: str, selected: Selection) -> Part:
    provided = plugins.find(group, selected.name)
    params_class(provided)  # a processor whose parameters cannot be checked does not start
    if group in CHAINS:
        return Part(group, provided, _checked(provided, selected, f"{group}.{selected.name}"))
    option = Option(group, selected.name, partial(_owners, plugins, group))
    shared = settings.model if group == "model" else None
    also = ("name", *MODEL_KEYS) if group == "model" else ("name",)
    return Part(group, provided, _checked(provided, selected, group, also, option), shared)


def _owners(plugins: Plugins, group: str, key: str) -> list[str]:
    """Which built-in components of the group have a key. What strangers wrote is imported only where it is selected."""
    found = []
    for provided in plugins.components(group):
        try:
            if provided.plugin.builtin and key in fields_of(settings_class(provided)):
                found.append(provided.component.name)
        except PluginError:
            continue  # what it needs is not installed, and this is only a hint
    return found


def _checked(
    provided: Provided, selected: Selection, path: str, also: Sequence[str] = (), option: Option | None = None
) -> BaseModel:
    """The values as the component's own class has them: its validators are a stranger's code, and may raise anything."""
    try:
        return validated(settings_class(provided), selected.values, path, also, option)
    except (NonetError, Terminated, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{provided.who}: its Settings cannot be checked: {described(error)}") from error


def build(part: Part, context: object) -> Any:
    """`Class(settings, context)`. Raises PluginError naming plugin, wheel and cause; our own errors pass as they are."""
    cls = import_target(part.provided, part.provided.component.target)
    try:
        return cls(part.settings, context)
    except (NonetError, Terminated, KeyboardInterrupt):
        raise
    except BaseException as error:
        hint = "; lower cache.memory, or raise the limit of memory" if isinstance(error, MemoryError) else ""
        raise PluginError(f"{part.who} could not be built: {described(error)}{hint}") from error


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
    _warn_of_hidden_tools(description, renderer, spec)
    admission: Admission = build(description.part("admission"), AdmissionContext(spec, time.monotonic, num_kv_slots))
    detokenizer: Detokenizer = build(description.part("detokenizer"), DetokenizerContext(tokenizer))
    figures = GrammarFigures()
    return FrontPipeline(
        model=spec,
        renderer=renderer,
        admission=admission,
        detokenizer=detokenizer,
        request_fields=RequestFields(description, plugins),
        observers=_build_observers(description, settings.plugins, spec, figures),
        tool_parser=_build_tool_parser(description, plugins, spec),
        reasoning_parser=_build_reasoning_parser(description, spec),
        names=description.names,
        limits=FrontLimits(
            block_timeout=settings.plugins.block_timeout,
            render_timeout=settings.plugins.render_timeout,
            quarantine_after=settings.plugins.quarantine_after,
        ),
        grammars=grammar_setup(description, settings, plugins, spec, figures),
    )


def _warn_of_hidden_tools(description: PipelineDescription, renderer: Renderer, spec: ModelSpec) -> None:
    """A tool parser beside a template that shows no tools: each request with tools would be refused."""
    from core.stages.text_renderer import NO_TOOLS, Text

    parser = description.part("tool_parser").provided.component
    if "tools" in parser.provides and isinstance(renderer, Text) and not renderer.shows_tools:
        log.warning("tool_parser=%s: %s", parser.name, NO_TOOLS.format(model=spec.name))


def _build_tool_parser(description: PipelineDescription, plugins: Plugins, spec: ModelSpec) -> ToolParser:
    able = [p.component.name for p in plugins.components("tool_parser") if "tools" in p.component.provides]
    part, context = description.part("tool_parser"), ToolParserContext(spec, tuple(sorted(able)))
    parser: ToolParser = build(part, context)
    return parser if "tools" in part.provided.component.provides else NoTools(NoTools.Settings(), context)


def _build_reasoning_parser(description: PipelineDescription, spec: ModelSpec) -> ReasoningParser:
    part, context = description.part("reasoning_parser"), ReasoningParserContext(spec)
    parser: ReasoningParser = build(part, context)
    return parser if "reasoning" in part.provided.component.provides else NoReasoning(NoReasoning.Settings(), context)


def _build_observers(
    description: PipelineDescription, plugin_limits: PluginSettings, spec: ModelSpec, grammars: GrammarFigures
) -> Observers:
    observers = Observers(quarantine_after=plugin_limits.quarantine_after, block_timeout=plugin_limits.block_timeout)
    context = ObserverContext(spec, description, observers.dropped, grammars)
    for part in description.chain("observers"):
        observers.add(Named(part.provided.component.name, part.plugin_text, build(part, context)))
    return observers


def build_frontend(description: PipelineDescription, context: FrontendContext) -> Frontend:
    """Stage 1."""
    return cast(Frontend, build(description.part("frontend"), context))


def build_engine(
    description: PipelineDescription,
    settings: Settings,
    plugins: Plugins,
    spec: ModelSpec,
    progress: Progress = no_progress,
) -> EnginePipeline:
    """Stages 4 to 7 and 9, with the model loaded and the KV pool allocated."""
    from core.blueprint import Blueprint
    from core.host_memory import host_memory

    step_limits = _settings_of(description, "scheduler", SchedulerSettings)
    pool = _settings_of(description, "cache", CacheSettings)
    tell_of_kept_windows(description, pool, spec)
    executor = _build_executor(description, settings, plugins, spec, progress)
    max_tokens = min(step_limits.max_num_scheduled_tokens, spec.max_model_len)
    make_prefill = partial(build, description.part("prefill"), PrefillContext(step_limits.max_num_scheduled_tokens))
    who, wanted = description.part("executor").who, wants_groups(description, pool)
    layout = read_layout(
        executor, who, wanted, pool, lambda: largest_step(make_prefill(), spec.max_model_len, max_tokens)
    )
    num_blocks = _allocate(pool, executor, spec, step_limits.max_num_running_reqs, layout)
    host = host_memory(
        executor, pool, who=who, num_kv_blocks=num_blocks, max_tokens=max_tokens, vocab_size=spec.vocab_size
    )

    def maker(group: str, context: object) -> Callable[[], Any]:
        return partial(build, description.part(group), context)

    blueprint = Blueprint(
        model=spec,
        executor=executor,
        completion=build(description.part("completion"), CompletionContext(spec)),
        predictor=build(description.part("predictor"), PredictorContext(spec.max_model_len)),
        make_cache=partial(
            _build_cache,
            description.part("cache"),
            pool.block_size,
            CacheContext(num_blocks, spec.max_model_len, host.num_blocks, layout.windows, layout.max_step_tokens),
        ),
        make_prefill=make_prefill,
        make_decode=maker("decode", DecodeContext(spec.max_model_len)),
        make_scheduler=partial(build, description.part("scheduler")),
        step_limits=step_limits,
        clock=time.monotonic,
        num_swap_blocks=host.num_blocks,
        swap_cost=host.cost,
        layout=layout,
    )
    return blueprint.build(_faults(description, settings.plugins))


def _build_cache(part: Part, block_size: int, context: CacheContext) -> KVCache:
    """A cache whose block ids and slots fit the KV memory that was allocated. Raises PluginError for another."""
    cache: KVCache = build(part, context)
    wanted_values = {"block_size": block_size, "num_blocks": context.num_blocks}
    if context.num_swap_blocks:
        wanted_values["num_swap_blocks"] = context.num_swap_blocks
    for name, wanted in wanted_values.items():
        try:
            found = getattr(cache, name)
        except (Terminated, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginError(f"{part.who}: its {name} cannot be read: {described(error)}") from error
        if type(found) is not int or found != wanted:
            raise PluginError(
                f"{part.who}: its {name} is {shown(found)}, and KV memory is laid out for {wanted}; it must be that of its "
                "settings and context"
            )
    return cache


def _faults(description: PipelineDescription, plugin_limits: PluginSettings) -> Faults:
    """One for the engine, and one where the model lives."""
    return Faults(description.names, plugin_limits.block_timeout)


def _settings_of(description: PipelineDescription, group: str, base: type[S]) -> S:
    """The settings of a component as the pipeline knows them. Raises PluginError where they do not extend `base`."""
    part = description.part(group)
    if not isinstance(part.settings, base):
        raise PluginError(f"{part.who}: its Settings must extend {base.__module__}.{base.__qualname__}")
    return part.settings


def _build_executor(
    description: PipelineDescription, settings: Settings, plugins: Plugins, spec: ModelSpec, progress: Progress
) -> Executor:
    from core.logits.sampling import SamplerBuilder

    step_limits = _settings_of(description, "scheduler", SchedulerSettings)
    pool = _settings_of(description, "cache", CacheSettings)
    processors = description.chain("logits_processors")
    grammars, jumps = description.chain("grammars"), _jumps_forward(description, settings)
    build_sampler = SamplerBuilder(
        description.part("sampler"), processors, grammars, build, spec, settings.plugins, jumps
    )
    context = ExecutorContext(
        spec=spec,
        build_model=partial(build, description.part("model")),
        build_attention=partial(_build_attention, description, plugins),
        build_quant=partial(build, description.part("quant")),
        build_sampler=build_sampler,
        dtype=settings.model.dtype,
        device=settings.model.device,
        block_size=pool.block_size,
        max_num_scheduled_tokens=step_limits.max_num_scheduled_tokens,
        max_num_running_reqs=step_limits.max_num_running_reqs,
        progress=progress,
        incidents=build_sampler.incidents,
        faults=_faults(description, settings.plugins),
        window_groups=wants_groups(description, pool),
    )
    return cast(Executor, build(description.part("executor"), context))


def _jumps_forward(description: PipelineDescription, settings: Settings) -> bool:
    """With ids in flight nobody knows what follows, so the executor must have sampled all before."""
    words = {"scheduler": "jump_forward", "executor": "history"}
    able = all(word in description.part(group).provided.component.provides for group, word in words.items())
    return able and settings.structured_outputs.jump_forward


def _build_attention(description: PipelineDescription, plugins: Plugins, context: AttentionContext) -> AttentionBackend:
    """Built before the model: by now the executor has decided on device and dtype."""
    check_resolved(description, plugins, context.device.type, str(context.dtype).removeprefix("torch."))
    return cast(AttentionBackend, build(description.part("attention"), context))


def _allocate(
    settings: CacheSettings, executor: Executor, spec: ModelSpec, max_running: int, layout: KVLayout | None = None
) -> int:
    """Size the KV pool: what config says, else a share of what is free where it will lie, never more than can be used."""
    layout = layout or KVLayout(block_size=settings.block_size)
    if settings.num_blocks is not None:
        num_blocks = settings.num_blocks * len(layout.windows)
    else:
        block_bytes = executor.kv_bytes_per_block()
        budget = settings.memory_bytes(executor.free_memory())
        num_blocks = min(budget // block_bytes, layout.num_needed(spec.max_model_len) * max_running)
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
    plugins = load_plugins(settings.plugins.disable, start_timeout=settings.plugins.start_timeout)
    plugins.check_start(settings.plugins.on_failure)
    return make_engine(settings, plugins, progress)


def make_engine(
    settings: Settings,
    plugins: Plugins,
    progress: Progress = no_progress,
    spec: ModelSpec | None = None,
    description: PipelineDescription | None = None,
) -> EngineLoop:
    """The engine, its model loaded. The model is found and read here where `spec` is not given, likewise `description`."""
    description = description or describe(settings, plugins)
    spec = spec or read_model(settings, progress)
    check_model(description, settings, plugins, spec)
    return engine_of(build_engine(description, settings, plugins, spec, progress), plugins)


def engine_of(pipeline: EnginePipeline, plugins: Plugins) -> EngineLoop:
    from core.engine import Engine
    from core.wire import EngineInfo

    spec = pipeline.model
    info = EngineInfo(
        num_kv_blocks=pipeline.cache.num_blocks,
        num_kv_slots=pipeline.layout.num_tokens(pipeline.cache.num_blocks),
        block_size=pipeline.cache.block_size,
        max_model_len=spec.max_model_len,
        model_name=spec.name,
        dtype=pipeline.executor.dtype,
        device=pipeline.executor.device,
        plugins=plugins.fingerprint(),
    )
    return Engine(pipeline, info)
