"""From a command line to a running pipeline: compose, select, check, start, run stage 1 until it ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from core.assembly import build_front, build_frontend, describe, make_engine, read_model
from core.compose import ComposedConfig, compose, disabled_by
from core.pipeline import FrontPipeline, Part, PipelineDescription
from core.plugins import Plugins, import_target, load_plugins
from core.progress import Progress, no_progress
from core.settings import PluginSettings, Settings, validated

if TYPE_CHECKING:
    from core.client import EngineClient
    from core.front import Front
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer
    from core.outputs import StepStats
    from core.stages.frontend import Frontend


@dataclass(frozen=True, slots=True)
class Session:
    """A checked config; nothing is running yet."""

    config: ComposedConfig
    settings: Settings
    plugins: Plugins
    description: PipelineDescription


def open_session(overrides: Sequence[str], frontend: Mapping[str, Any] = MappingProxyType({})) -> Session:
    """Compose and check a config. `frontend` adds values to that group which are no config, such as a prompt.

    Raises ConfigError or PluginError before any model is read. Imports no torch unless a plugin's settings do.
    """
    plugins = load_plugins(disabled_by(overrides))  # before a plugin that must not even be imported is
    config = compose(overrides, plugins)
    disable = validated(PluginSettings, config.values.get("plugins") or {}, "plugins").disable
    if disable:
        plugins = load_plugins(disable)
        config = compose(overrides, plugins)
    values = {**config.values, "frontend": {**config.values.get("frontend", {}), **frontend}}
    settings = Settings.from_config(values)
    plugins.check_enabled(settings.plugins.enable)
    return Session(config, settings, plugins, describe(settings, plugins))


def make_client(session: Session, spec: ModelSpec, progress: Progress = no_progress) -> EngineClient:
    """The engine in a process of its own, or in a thread of this one, for the model that `spec` describes."""
    from core.client import InlineClient, ProcessClient

    process = session.settings.process
    if process.separate:
        settings_json = session.settings.located(spec.files.path).to_json()
        return ProcessClient(settings_json, plugins=session.plugins.fingerprint(), settings=process)
    return InlineClient(
        partial(make_engine, session.settings, session.plugins, progress, spec), probe_timeout=process.probe_timeout
    )


async def start_front(
    session: Session,
    progress: Progress = no_progress,
    step_observers: Sequence[Callable[[StepStats], None]] = (),
    imports: Sequence[Part] = (),
) -> Front:
    """Both halves, running. Close the front to end them. `step_observers` join those of the plugins.

    The model is fetched here. Then an engine process loads its weights while this one loads the tokenizer and the code
    of `imports`. When either half fails, the other is ended.
    """
    try:
        return await _started_front(session, progress, step_observers, imports)
    finally:
        progress("start", 1, 1)  # ends what is shown, also where it will never be complete


async def _started_front(
    session: Session,
    progress: Progress,
    step_observers: Sequence[Callable[[StepStats], None]],
    imports: Sequence[Part],
) -> Front:
    from core.front import Front
    from core.model.describe import ANY_MODEL_TYPE

    separate = session.settings.process.separate
    spec = read_model(session.settings, progress, ANY_MODEL_TYPE if separate else None)
    client = make_client(session, spec, progress)
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(client.close)
        starting = asyncio.create_task(client.start(progress)) if separate else None
        if starting is not None:
            on_failure.push_async_callback(_cancel, starting)
        # in a thread, so that the progress of the engine process is shown meanwhile
        tokenizer = await asyncio.to_thread(_load, spec, imports)
        pipeline = _front_pipeline(session, spec, client, tokenizer)
        pipeline = replace(pipeline, step_observers=(*pipeline.step_observers, *step_observers))
        front = Front(pipeline, client, time.monotonic)
        on_failure.push_async_callback(front.close)
        await front.start(progress, starting)
        on_failure.pop_all()
    return front


def _load(spec: ModelSpec, imports: Sequence[Part]) -> Tokenizer:
    from core.model.tokenizer import load_tokenizer

    for part in imports:
        import_target(part.provided, part.provided.component.target)
    return load_tokenizer(spec.files)


def _front_pipeline(session: Session, spec: ModelSpec, client: EngineClient, tokenizer: Tokenizer) -> FrontPipeline:
    def num_kv_slots() -> int:
        return client.info.num_kv_blocks * client.info.block_size

    return build_front(session.description, session.settings, session.plugins, spec, num_kv_slots, tokenizer)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run_frontend(session: Session, progress: Progress = no_progress) -> None:
    """Start everything and let the configured frontend run until it is done."""
    from core.stages.frontend import FrontendContext

    front = await start_front(session, progress, imports=[session.description.part("frontend")])
    try:
        context = FrontendContext(
            front=front,
            description=session.description,
            served_names=served_names(session.settings, front.model),
            metrics=session.plugins.plugin_object("core.metrics"),
            drain_timeout=session.settings.process.drain_timeout,
        )
        await _run_until_dead(build_frontend(session.description, context), front)
    finally:
        await front.close()


async def _run_until_dead(frontend: Frontend, front: Front) -> None:
    """The frontend decides when it is done, unless the engine is gone for good: then it is ended. Raises EngineDeadError."""
    running = asyncio.ensure_future(frontend.run())
    dead = asyncio.ensure_future(front.wait_dead())
    try:
        await asyncio.wait({running, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=5.0)
            raise dead.result()
        await running
    finally:
        await asyncio.gather(_cancel(running), _cancel(dead))


def served_names(settings: Settings, spec: ModelSpec) -> tuple[str, ...]:
    names = (
        (settings.model.served_name, spec.name) if settings.model.served_name else (spec.name, settings.model.source)
    )
    return tuple(dict.fromkeys(name for name in names if name))


def log_to_stderr(level: int = logging.INFO) -> None:
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
