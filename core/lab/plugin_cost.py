"""What plugins cost the framework: its own time per step with five observers and three logits processors, over that with none.

Two pipelines of one process take turns (plain, loaded, loaded, plain …), so that noise of the machine and its drift hit both.
Of each round the median step counts, and of the rounds the faster half: what a machine does besides only ever adds time. The
framework's own time is what the engine loop spends outside model and sampler, and what the chain of processors spends beside
the processors' own arithmetic. What the front's event loop spends per step is shown apart: it is another process in a server.
Front and observers' threads share the process with the engine here, which is worse for it than two processes are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.components import PluginRecord, Provided
from core.hookspecs import Component
from core.lab.bench.steps import FRAMEWORK
from core.lab.stopwatch import ChainWatch, Counter, Overhead
from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats
from core.pipeline import Part, PipelineDescription
from core.request import SamplingParams
from core.session import Session, open_session
from core.stages.frontend import GenerateRequest
from core.stages.logits_processor import LogitsChain
from core.stages.renderer import TokenPrompt
from core.testing.harness.pipelines import RunningPipeline

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
class Round:
    """32 requests from their first to their last step. Seconds of the median step in which all of them decode."""

    engine_s: float  # the engine loop outside model and sampler
    chain_s: float  # the chain of processors beside their own arithmetic
    processors_s: float
    front_s: float  # of the front's event loop
    num_steps: int

    @property
    def framework_s(self) -> float:
        return self.engine_s + self.chain_s


@dataclass(frozen=True, slots=True)
class Cost:
    """Means over the faster half of the rounds. Times in milliseconds per step of 32 decodes."""

    plain_ms: float  # the framework, without plugins
    loaded_ms: float  # with them: engine loop, and chain beside the processors' arithmetic
    chain_ms: float  # of it, what the chain takes more than one of no processors
    processors_ms: float  # the processors' own, not in `loaded_ms`
    front_plain_ms: float  # the front's event loop, in neither of the two
    front_loaded_ms: float
    spread: float  # between the quartiles of what single pairs of rounds say of `growth`
    num_steps: int  # of both pipelines that were counted
    observers: tuple[str, ...] = ()
    processors: tuple[str, ...] = PROCESSORS

    @property
    def growth(self) -> float:
        return self.loaded_ms / self.plain_ms - 1


class Runner:
    """One of the two pipelines, and what its steps of 32 decodes took."""

    def __init__(self, session: Session, extra: dict[str, dict[str, Any]], overhead: Overhead):
        self.pipeline = RunningPipeline(session)
        self._extra = extra
        self._overhead = overhead
        self._chain = ChainWatch(overhead)
        self._front_s: list[float] = []  # per message of the engine, which is one per step

    async def start(self, stack: AsyncExitStack) -> None:
        front = self.pipeline.front
        self._watch_front(front)
        stack.push_async_callback(front.close)
        await front.start(lambda what, done, total: None)
        self._chain.watch(_chain_of(self.pipeline))

    def _watch_front(self, front: Any) -> None:
        counter = Counter()
        take = counter.timed(front._take)

        def timed_take(output: Any) -> None:
            take(output)
            seconds, _ = counter.take()
            if output.stats.num_requests == NUM_REQUESTS:
                self._front_s.append(seconds - self._overhead.own_s)

        front._take = timed_take

    async def round(self, number: int, output_len: int) -> Round:
        for kept in (self.pipeline.steps, self._chain.steps, self._front_s):
            kept.clear()
        await self.pipeline.answer_all([self._request(f"{number}-{i}", output_len) for i in range(NUM_REQUESTS)])
        steps = [s for s in self.pipeline.steps if s.num_requests == NUM_REQUESTS and not s.num_prefill_tokens]
        chain = self._chain.steps
        return Round(
            engine_s=median(sum(getattr(step, name) for name in FRAMEWORK) for step in steps),
            chain_s=median(step.chain_s for step in chain),
            processors_s=median(step.processors_s for step in chain),
            front_s=median(self._front_s),
            num_steps=len(steps),
        )

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


def _chain_of(pipeline: RunningPipeline) -> LogitsChain:
    """Also the one of no processors: the first code after a forward pass finds cold caches, whoever it belongs to, and both
    pipelines are to pay for that at the same place."""
    executor: Any = pipeline.engine._pipeline.executor
    sampler = executor._sampler
    chain: LogitsChain = getattr(sampler, "_chain", None) or sampler._processors
    return chain


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


async def plugin_cost(overrides: Sequence[str], folder: Path, num_rounds: int = 8, output_len: int = 48) -> Cost:
    """`num_rounds` of each pipeline, and a first one of each that is not counted."""
    plain_session, loaded_session = sessions(overrides, folder)
    overhead = Overhead.measured()
    runners = {"plain": Runner(plain_session, {}, overhead), "loaded": Runner(loaded_session, EXTRA, overhead)}
    rounds: dict[str, list[Round]] = {name: [] for name in runners}
    async with AsyncExitStack() as stack:
        for runner in runners.values():
            await runner.start(stack)
        for number in range(num_rounds + 1):
            order = list(runners) if number % 2 else list(reversed(runners))
            for name in order:
                found = await runners[name].round(number, output_len)
                rounds[name] += [found] if number else []
    observers = tuple(part.provided.component.name for part in loaded_session.description.chain("observers"))
    return summed_up(rounds["plain"], rounds["loaded"], observers)


def summed_up(plain: Sequence[Round], loaded: Sequence[Round], observers: tuple[str, ...] = ()) -> Cost:
    """`plain[i]` and `loaded[i]` ran one after the other."""
    fast_plain, fast_loaded = _faster_half(plain), _faster_half(loaded)
    growths = [b.framework_s / a.framework_s - 1 for a, b in zip(plain, loaded, strict=True)]
    low, _, high = quantiles(growths, n=4) if len(growths) > 1 else (0.0, 0.0, 0.0)
    return Cost(
        plain_ms=1000 * fmean(r.framework_s for r in fast_plain),
        loaded_ms=1000 * fmean(r.framework_s for r in fast_loaded),
        chain_ms=1000 * (fmean(r.chain_s for r in fast_loaded) - fmean(r.chain_s for r in fast_plain)),
        processors_ms=1000 * fmean(r.processors_s for r in fast_loaded),
        front_plain_ms=1000 * fmean(r.front_s for r in fast_plain),
        front_loaded_ms=1000 * fmean(r.front_s for r in fast_loaded),
        spread=high - low,
        num_steps=sum(r.num_steps for r in (*fast_plain, *fast_loaded)),
        observers=observers,
    )


def _faster_half(rounds: Sequence[Round]) -> list[Round]:
    return sorted(rounds, key=lambda found: found.framework_s)[: (len(rounds) + 1) // 2]


def as_line(cost: Cost) -> str:
    return (
        f"framework per step at {NUM_REQUESTS} requests: {cost.plain_ms:.3f} ms without plugins, {cost.loaded_ms:.3f} ms with "
        f"{len(cost.observers)} observers and {len(cost.processors)} logits processors ({cost.growth:+.1%}, spread "
        f"{cost.spread:.1%}; of it the chain {1000 * cost.chain_ms:.0f} µs; the processors' own arithmetic "
        f"{cost.processors_ms:.2f} ms is apart); front's event loop per step {cost.front_plain_ms:.3f} ms and "
        f"{cost.front_loaded_ms:.3f} ms; {cost.num_steps} steps counted"
    )


def run(overrides: Sequence[str], folder: Path) -> Cost:
    return asyncio.run(plugin_cost(overrides, folder))
