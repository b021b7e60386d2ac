"""What plugins cost the framework: its own time per step with five observers and three logits processors, over that with none.

Two pipelines of one process take turns, so that noise of the machine hits both. The framework's own time is what the engine
loop spends outside model and sampler, and what the chain of processors spends beside the processors' own arithmetic. Front
and observers' threads share the process with the engine here, which is worse for it than two processes are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.hookspecs import Component
from core.lab.bench import FRAMEWORK
from core.logits.chain import ProcessorChain
from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats
from core.pipeline import Part, PipelineDescription
from core.plugins import PluginRecord, Provided
from core.request import SamplingParams
from core.session import Session, open_session
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt
from core.testing.pipelines import RunningPipeline

NUM_REQUESTS = 32
PROCESSORS = ("min_tokens", "dry", "watermark")
EXTRA: dict[str, dict[str, Any]] = {"dry": {}, "watermark": {}}
HOOKS = tuple(f"core.lab.plugin_cost:{name}" for name in ("First", "Second"))


class First:
    """A stranger's observer that counts."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: ObserverContext):
        self.steps = self.requests = 0

    def step_finished(self, stats: StepStats) -> None:
        self.steps += 1

    def request_finished(self, record: RequestRecord) -> None:
        self.requests += 1

    def close(self) -> None:
        """Nothing is held back."""


class Second(First):
    """Another one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over rounds. Times in milliseconds per step of 32 decodes."""

    plain_ms: float  # the framework, without plugins
    loaded_ms: float  # with them: engine loop, and chain beside the processors' arithmetic
    chain_ms: float  # of it, the chain
    processors_ms: float  # the processors' own, not in `loaded_ms`
    growth: float  # median over rounds of loaded / plain - 1
    num_steps: int
    observers: tuple[str, ...] = ()
    processors: tuple[str, ...] = PROCESSORS


@dataclass(slots=True)
class Stopwatch:
    """Seconds in the chain, and of them in the processors themselves."""

    chain_s: float = 0.0
    own_s: float = 0.0
    _wrapped: list[tuple[Any, str, Any]] = field(default_factory=list)

    def timed(self, fn: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return fn(*args)
            finally:
                setattr(self, counter, getattr(self, counter) + time.perf_counter() - started)

        return call


@contextmanager
def _watched(chain: ProcessorChain) -> Iterator[Stopwatch]:
    """Time a chain's calls from outside, and its processors' inside."""
    watch = Stopwatch()
    for member in chain._members:
        member.processor = _Timed(member.processor, watch)
    for name in ("touches", "apply"):
        setattr(chain, name, watch.timed(getattr(chain, name), "chain_s"))
    yield watch


class _Timed:
    def __init__(self, processor: Any, watch: Stopwatch):
        self.state = processor.state
        self.apply = watch.timed(processor.apply, "own_s")


class Runner:
    """One of the two pipelines, and what its steps of 32 decodes took."""

    def __init__(self, session: Session, extra: dict[str, dict[str, Any]]):
        self.pipeline = RunningPipeline(session)
        self._extra = extra
        self._watch: Stopwatch | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.pipeline.front.close)
        await self.pipeline.front.start(lambda what, done, total: None)
        chain = _chain_of(self.pipeline)
        if chain is not None:
            self._watch = stack.enter_context(_watched(chain))

    async def round(self, number: int, output_len: int) -> tuple[list[float], float, float]:
        """(framework seconds of each full step, seconds of the chain per step, of the processors per step)."""
        self.pipeline.steps.clear()
        before = (self._watch.chain_s, self._watch.own_s) if self._watch else (0.0, 0.0)
        await self.pipeline.answer_all([self._request(f"{number}-{i}", output_len) for i in range(NUM_REQUESTS)])
        steps = [s for s in self.pipeline.steps if s.num_requests == NUM_REQUESTS and not s.num_prefill_tokens]
        after = (self._watch.chain_s, self._watch.own_s) if self._watch else (0.0, 0.0)
        count = len(self.pipeline.steps)
        chain_s, own_s = ((b - a) / count for a, b in zip(before, after, strict=True))
        return [sum(getattr(step, name) for name in FRAMEWORK) for step in steps], chain_s - own_s, own_s

    def _request(self, request_id: str, output_len: int) -> GenerateRequest:
        params = SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=7,
            ignore_eos=True,
            min_tokens=output_len if self._extra else 0,
            extra=self._extra,
        )
        return GenerateRequest(request_id, TokenPrompt(list(range(10, 42))), params, max_tokens=output_len)


def _chain_of(pipeline: RunningPipeline) -> ProcessorChain | None:
    executor: Any = pipeline.engine._pipeline.executor
    chain = getattr(getattr(executor, "_sampler", None), "_chain", None)
    return chain if isinstance(chain, ProcessorChain) else None


def _with_strangers(description: PipelineDescription) -> PipelineDescription:
    record = PluginRecord("bench", "bench", "1.0", "loaded")
    names = ("first", "second")
    parts = [
        Part("observers", Provided("observers", Component(name, target, "counts"), record), First.Settings())
        for name, target in zip(names, HOOKS, strict=True)
    ]
    return PipelineDescription((*description.parts, *parts))


def sessions(overrides: Sequence[str], folder: Path) -> tuple[Session, Session]:
    """Without plugins, and with five observers and three logits processors."""
    fixed = ("process.separate=false", "plugins.on_failure=disable")
    plain = open_session([*overrides, *fixed, "observers=[]", "logits_processors=[]"])
    observers = ("observers=[prometheus,jsonl,otel]", f"observers.jsonl.path={folder / 'trace.jsonl'}")
    loaded = open_session([*overrides, *fixed, *observers, f"logits_processors=[{','.join(PROCESSORS)}]"])
    return plain, replace(loaded, description=_with_strangers(loaded.description))


async def plugin_cost(overrides: Sequence[str], folder: Path, num_rounds: int = 7, output_len: int = 48) -> Cost:
    """Rounds of both pipelines in turn; the first of each is not counted."""
    plain_session, loaded_session = sessions(overrides, folder)
    plain, loaded = Runner(plain_session, {}), Runner(loaded_session, EXTRA)
    found = []
    async with AsyncExitStack() as stack:
        for runner in (plain, loaded):
            await runner.start(stack)
        for number in range(num_rounds + 1):
            pair = [await runner.round(number, output_len) for runner in (plain, loaded)]
            found += [pair] if number else []
    observers = tuple(part.provided.component.name for part in loaded_session.description.chain("observers"))
    plain_s = [median(first[0]) for first, _ in found]
    chain_s = [second[1] for _, second in found]
    loaded_s = [median(second[0]) + chain for (_, second), chain in zip(found, chain_s, strict=True)]
    return Cost(
        plain_ms=1000 * median(plain_s),
        loaded_ms=1000 * median(loaded_s),
        chain_ms=1000 * median(chain_s),
        processors_ms=1000 * median(second[2] for _, second in found),
        growth=median(b / a for a, b in zip(plain_s, loaded_s, strict=True)) - 1,
        num_steps=sum(len(second[0]) for _, second in found),
        observers=observers,
    )


def as_line(cost: Cost) -> str:
    return (
        f"framework per step at {NUM_REQUESTS} requests: {cost.plain_ms:.3f} ms without plugins, {cost.loaded_ms:.3f} ms with "
        f"{len(cost.observers)} observers and {len(cost.processors)} logits processors ({cost.growth:+.1%}; of it the chain "
        f"{1000 * cost.chain_ms:.0f} µs; the processors' own arithmetic {cost.processors_ms:.2f} ms is apart)"
    )


def run(overrides: Sequence[str], folder: Path) -> Cost:
    return asyncio.run(plugin_cost(overrides, folder))
