"""The real engine in a thread of this process, which tells what each of its steps did and how long it took."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from core.assembly import build_engine, build_front, engine_of, read_model
from core.batch import ModelBatch, SchedulerOutput
from core.border.inline_client import InlineClient
from core.border.step_loop import EngineLoop
from core.capabilities import check_model
from core.front.front import Front
from core.model.spec import ModelSpec
from core.outputs import StepStats, Timings
from core.pipeline import BuildsBatches, EnginePipeline
from core.progress import Progress, no_progress
from core.request import SamplingParams
from core.session import Session
from core.simulation.cost import Work
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt
from core.wire import EngineInfo

# No queue is too long, and a step that takes its time on a busy machine is only that: no fault of a plugin.
OVERRIDES: Final = (
    "process.separate=false",
    "process.probe_timeout=600",
    "plugins.block_timeout=600",
    "admission=open",
)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    work: Work
    stats: StepStats


@dataclass(slots=True)
class RealEngine:
    """Front and engine, running. `steps` grows while they do."""

    spec: ModelSpec
    front: Front
    client: InlineClient
    pipelines: list[EnginePipeline]  # one; there when the engine has started
    steps: list[MeasuredStep] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    async def generate(self, request_id: str, prompt_token_ids: list[int], num_output: int) -> Timings:
        """A greedy answer of just so many tokens."""
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id, TokenPrompt(prompt_token_ids), params, max_tokens=num_output)
        async with aclosing(self.front.generate(request)) as outputs:
            last = [choice async for output in outputs for choice in output.outputs][-1]
        assert last.timings is not None
        return last.timings


class _Recorder:
    """Stands before the batch builder, and keeps what was in each step by its number."""

    def __init__(self, builder: BuildsBatches, works: dict[int, Work]):
        self._builder = builder
        self._works = works

    def build(self, output: SchedulerOutput) -> ModelBatch:
        self._works[output.step] = work_of(output)
        return self._builder.build(output)


def work_of(output: SchedulerOutput) -> Work:
    work = Work()
    for part in output.scheduled:
        if part.num_tokens == 1 and part.start >= part.request.num_prompt_tokens:
            work.add_decode(part.start)
        else:
            work.add_chunk(part.start, part.num_tokens)
    return work


@asynccontextmanager
async def real_engine(session: Session, progress: Progress = no_progress) -> AsyncIterator[RealEngine]:
    """Starts both halves, and ends them. Raises what a start of the server would."""
    spec = read_model(session.settings, progress)
    check_model(session.description, session.settings, session.plugins, spec)
    works: dict[int, Work] = {}
    pipelines: list[EnginePipeline] = []

    def make() -> EngineLoop:
        built = build_engine(session.description, session.settings, session.plugins, spec, progress)
        pipelines.append(replace(built, batch_builder=_Recorder(built.batch_builder, works)))
        return engine_of(pipelines[0], session.plugins)

    client = InlineClient(make, probe_timeout=session.settings.process.probe_timeout)

    def num_kv_slots() -> int:
        return client.info.num_kv_slots

    halves = build_front(session.description, session.settings, session.plugins, spec, num_kv_slots)
    real = RealEngine(spec, Front(halves, client, time.monotonic), client, pipelines)

    def note(stats: StepStats) -> None:
        if stats.num_requests and (work := works.pop(stats.step, None)) is not None:
            real.steps.append(MeasuredStep(work, stats))

    halves.observers.add_taps((note,))
    try:
        await real.front.start(progress)
        yield real
    finally:
        await real.front.close()
