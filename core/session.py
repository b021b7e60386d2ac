"""From a command line to a running pipeline: compose, select, check, start, run stage 1 until it ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from core.assembly import build_front, build_frontend, describe, make_engine, read_model
from core.capabilities import check_model
from core.components import import_target
from core.config.compose import ComposedConfig, compose, values_named
from core.config.keys import validated
from core.errors import NonetError, PluginError, Terminated, described
from core.pipeline import FrontPipeline, Part, PipelineDescription
from core.plugins import Plugins, load_plugins
from core.progress import Progress, no_progress
from core.settings import PluginSettings, Settings

if TYPE_CHECKING:
    from core.border.early import EarlyProcess
    from core.client import EngineClient
    from core.front.front import Front
    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer
    from core.outputs import StepStats
    from core.stages.frontend import Frontend, FrontendContext


@dataclass(frozen=True, slots=True)
class Session:
    """A checked config; nothing is running yet."""

    config: ComposedConfig
    settings: Settings
    plugins: Plugins
    description: PipelineDescription


def open_session(overrides: Sequence[str], frontend: Mapping[str, Any] = MappingProxyType({})) -> Session:
    """`inspect_session` for what is to be started: what `plugins.on_failure` says of plugins that failed to load is done.

    Raises PluginError where it says `refuse` and there is one, ConfigError or PluginError as `inspect_session` does.
    """
    session = inspect_session(overrides, frontend)
    session.plugins.check_start(session.settings.plugins.on_failure)
    return session


def inspect_session(overrides: Sequence[str], frontend: Mapping[str, Any] = MappingProxyType({})) -> Session:
    """Compose and check a config; plugins that failed to load matter only where config selects them.

    `frontend` adds values to that group which are no config, such as a prompt. Raises ConfigError or PluginError before
    any model is read. Imports no torch unless a plugin's settings do.
    """
    early = validated(PluginSettings, values_named(overrides, "plugins"), "plugins")
    plugins = _load_plugins(early)  # before config is composed, which needs theirs
    config = compose(overrides, plugins)
    with config.naming_files():
        chosen = validated(PluginSettings, config.values.get("plugins") or {}, "plugins")
    if (chosen.disable, chosen.start_timeout) != (early.disable, early.start_timeout):  # a preset says so
        plugins = _load_plugins(chosen)
        config = compose(overrides, plugins)
    values = {**config.values, "frontend": {**config.values.get("frontend", {}), **frontend}}
    with config.naming_files():
        settings = Settings.from_config(values)
        return Session(config, settings, plugins, describe(settings, plugins))


def _load_plugins(settings: PluginSettings) -> Plugins:
    return load_plugins(settings.disable, start_timeout=settings.start_timeout)


def make_client(
    session: Session, spec: ModelSpec, progress: Progress = no_progress, early: EarlyProcess | None = None
) -> EngineClient:
    """The engine in a process of its own, or in a thread of this one, for the model that `spec` describes."""
    from core.client import InlineClient, ProcessClient

    process = session.settings.process
    if process.separate:
        settings = session.settings.for_process(spec.files.path, session.plugins.left_out())
        return ProcessClient(settings, plugins=session.plugins.fingerprint(), settings=process, early=early)
    return InlineClient(
        partial(make_engine, session.settings, session.plugins, progress, spec), probe_timeout=process.probe_timeout
    )


async def start_front(
    session: Session,
    progress: Progress = no_progress,
    taps: Sequence[Callable[[StepStats], None]] = (),
    imports: Sequence[Part] = (),
    early: EarlyProcess | None = None,
) -> Front:
    """Both halves, running. Close the front to end them. `taps` join those of the plugins.

    The model is fetched here. Then an engine process loads its weights while this one loads the tokenizer and the code
    of `imports`. When either half fails, the other is ended.
    """
    try:
        return await _started_front(session, progress, taps, imports, early)
    finally:
        progress("start", 1, 1)  # ends what is shown, also where it will never be complete


async def _started_front(
    session: Session,
    progress: Progress,
    taps: Sequence[Callable[[StepStats], None]],
    imports: Sequence[Part],
    early: EarlyProcess | None,
) -> Front:
    from core.front.front import Front
    from core.model.describe import ANY_MODEL_TYPE

    separate = session.settings.process.separate
    spec = read_model(session.settings, progress, ANY_MODEL_TYPE if separate else None)
    check_model(session.description, session.settings, session.plugins, spec)
    client = make_client(session, spec, progress, early)
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(client.close)
        starting = asyncio.create_task(client.start(progress)) if separate else None
        if starting is not None:
            on_failure.push_async_callback(_cancel, starting)
        # in a thread, so that the progress of the engine process is shown meanwhile
        tokenizer = await asyncio.to_thread(_load, spec, imports)
        pipeline = _front_pipeline(session, spec, client, tokenizer)
        pipeline.observers.add_taps(taps)
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
        return client.info.num_kv_slots or client.info.num_kv_blocks * client.info.block_size

    return build_front(session.description, session.settings, session.plugins, spec, num_kv_slots, tokenizer)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run_frontend(session: Session, progress: Progress = no_progress, early: EarlyProcess | None = None) -> None:
    """Start everything and let the configured frontend run until it is done."""
    front = await start_front(session, progress, imports=[session.description.part("frontend")], early=early)
    try:
        frontend = build_frontend(session.description, frontend_context(session, front))
        await _run_until_dead(_run(frontend, session.description.part("frontend")), front)
    finally:
        await front.close()


def frontend_context(session: Session, front: Front) -> FrontendContext:
    from core.metrics import Metrics
    from core.stages.frontend import FrontendContext

    installed = session.plugins.components("tool_parser")
    knowing = {provided.component.name for provided in installed if "grammar" in provided.component.provides}
    selected = session.description.part("tool_parser").provided.component.name
    return FrontendContext(
        front=front,
        description=session.description,
        served_names=served_names(session.settings, front.model),
        metrics=front.observers.find(Metrics),
        drain_timeout=session.settings.process.drain_timeout,
        grammar_parsers=tuple(sorted(knowing - {selected})),
        grammar_parser=selected if selected in knowing else "",
    )


async def _run(frontend: Frontend, part: Part) -> None:
    """What ends the server is named: SystemExit, too, which would pass through the event loop without a word.

    A closed stream is the terminal's doing, and errors of ours say by themselves what to do.
    """
    try:
        await frontend.run()
    except (NonetError, Terminated, BrokenPipeError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except OSError as error:
        if part.provided.plugin.builtin:  # a full disk, an address in use
            raise
        raise PluginError(f"{part.who} ended: {described(error)}") from error
    except BaseException as error:
        raise PluginError(f"{part.who} ended: {described(error)}") from error


async def _run_until_dead(running_frontend: Coroutine[Any, Any, None], front: Front) -> None:
    """The frontend decides when it is done, unless the engine is gone for good: then it is ended. Raises EngineDeadError."""
    running = asyncio.ensure_future(running_frontend)
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
