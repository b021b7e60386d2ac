"""`simulate compare`: the same requests through the real engine and through the simulator, side by side.

The machine is measured (as by `simulate fit`) before and after, or a cost file says how it is. Lengths are
those of the conversation traffic, made shorter, so that a CPU is through in minutes.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.outputs import Timings
from core.progress import ProgressBars
from core.session import Session, open_session
from core.simulation.build import SimulationSettings, open_simulation
from core.simulation.cost import StepClock, doubt, load_cost
from core.simulation.course import Course, say
from core.simulation.files import write_text
from core.simulation.fit import FitSettings, cost_of, measure
from core.simulation.lengths import Lengths
from core.simulation.load import at_load
from core.simulation.loop import simulate
from core.simulation.real import OVERRIDES, MeasuredStep, RealEngine, real_engine
from core.simulation.records import Arrival, RunResult
from core.simulation.traffic import CONVERSATION, TrafficSettings, open_traffic

WARM_UP: Final = 4  # requests that do not count


class CompareSettings(BaseModel):
    """`simulate compare num_requests=200 load=0.7 +preset=chat`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cost: str | None = Field(
        default=None, description="a file that `simulate fit` wrote; null: measured, before and after"
    )
    fit_seconds: float = Field(default=60.0, gt=0, le=3600, description="of measuring, without a cost file")
    num_requests: int = Field(default=200, ge=1, description="sent through the engine, and simulated")
    load: float = Field(default=0.7, gt=0, le=100, description="of what fcfs could serve")
    scale: float = Field(default=0.1, gt=0, le=1, description="of the lengths of the conversation traffic")
    seed: int = Field(default=0, description="of lengths, times and prompts")
    max_error: float = Field(
        default=0.15, gt=0, description="of mean TTFT and of throughput: more ends with exit code 1"
    )
    output: str | None = Field(default=None, description="a JSON file to write")

    @model_validator(mode="after")
    def _consistent(self) -> CompareSettings:
        if self.cost is not None and "fit_seconds" in self.model_fields_set:
            raise ValueError("fit_seconds does nothing beside cost: with a cost file nothing is measured")
        return self


@dataclass(frozen=True, slots=True)
class Side:
    """Figures of one side. Seconds, and tokens per second."""

    mean_ttft_s: float
    mean_tpot_s: float
    mean_e2e_s: float
    output_tokens_per_s: float

    def errors(self, truth: Side) -> dict[str, float]:
        """Of each figure, as a share of the true one."""
        return {name: getattr(self, name) / getattr(truth, name) - 1 for name in self.__slots__}


def compare(overrides: Sequence[str], settings: CompareSettings) -> dict[str, Any]:
    """Both sides and how far they are apart, JSON-ready. Raises what a start of the engine would."""
    words = [*OVERRIDES, *overrides]
    return asyncio.run(_compare(open_session(words), words, settings))


def error(found: Mapping[str, Any]) -> float:
    """The larger one of mean TTFT and throughput, as a share of what was real."""
    return max(abs(float(found["errors"][name])) for name in ("mean_ttft_s", "output_tokens_per_s"))


async def _compare(session: Session, overrides: Sequence[str], settings: CompareSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cost = settings.cost or str(Path(folder) / "cost.json")
        simulation = SimulationSettings(cost=cost)
        async with real_engine(session, ProgressBars()) as real:
            words = [*overrides, f"cache.num_blocks={real.pipelines[0].cache.num_blocks}"]
            before = await _measured(real, cost, settings)
            traffic = open_traffic(at_load(_traffic(settings), words, simulation))
            arrivals = list(traffic)
            timings, wall_s = await _drive(real, arrivals, settings.seed)
            steps = list(real.steps)
            await _measured(real, cost, settings, before)
        result = simulate(open_simulation(words, simulation, traffic.shares_content), traffic)
        step_error, used = _step_error(steps, cost), load_cost(cost)
    truth, said = _real(timings, arrivals, wall_s), _simulated(result)
    return {
        "real": _dict(truth),
        "simulated": _dict(said),
        "errors": said.errors(truth),
        "requests": len(arrivals),
        "offered_requests_per_s": _rate(arrivals),
        "steps": {"real": len(steps), "simulated": result.steps.num_steps},
        "step_error": step_error,
        "fit": used.fit,
        "doubt": doubt(used),
    }


async def _measured(
    real: RealEngine, cost: str, settings: CompareSettings, before: Sequence[MeasuredStep] = ()
) -> list[MeasuredStep]:
    """Half of the measuring, whose result is written to `cost` with that of the half `before`; nothing where a file is given.

    One half before the run and one after it: a machine that changes slowly is on average what it was in between.
    """
    if settings.cost is not None:
        return []
    asked = FitSettings(output=cost, seconds=settings.fit_seconds / 2, max_prompt_len=_longest(settings))
    steps = [*before, *await measure(real, asked)]
    write_text("cost", cost, cost_of(real, steps).model_dump_json())
    return steps


def _longest(settings: CompareSettings) -> int:
    return round(settings.scale * CONVERSATION.prompt.cap)


def _traffic(settings: CompareSettings) -> TrafficSettings:
    lengths = [_scaled(one, settings.scale) for one in (CONVERSATION.prompt, CONVERSATION.output)]
    return TrafficSettings(
        workload="conversation",
        num_requests=settings.num_requests,
        load=settings.load,
        seed=settings.seed,
        prompt_len=lengths[0],
        output_len=lengths[1],
    )


def _scaled(lengths: Lengths, scale: float) -> Lengths:
    return Lengths(**{key: max(round(scale * value), 1) for key, value in lengths.model_dump().items()})


async def _drive(real: RealEngine, arrivals: Sequence[Arrival], seed: int) -> tuple[list[Timings], float]:
    """Each request at its time. Returns their timings, and the seconds from the first moment to the last end."""
    rng, vocab_size = random.Random(seed), real.spec.vocab_size
    prompts = [[rng.randrange(vocab_size // 10, vocab_size) for _ in range(a.num_prompt_tokens)] for a in arrivals]
    for index in range(WARM_UP):
        await real.generate(f"warm-{index}", prompts[index % len(prompts)][::-1], 4)
    say(_announced(arrivals))
    real.steps.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(index: int, arrival: Arrival, course: Course) -> Timings:
        await asyncio.sleep(began + arrival.time_s - loop.time())
        found = await real.generate(f"compare-{index}", prompts[index], arrival.num_output_tokens)
        course.add()
        return found

    with Course("requests answered", len(arrivals)) as course:
        timings = await asyncio.gather(*(one(index, arrival, course) for index, arrival in enumerate(arrivals)))
    return timings, loop.time() - began


def _announced(arrivals: Sequence[Arrival]) -> str:
    return f"sending {len(arrivals)} requests at {_rate(arrivals):.1f}/s: about {arrivals[-1].time_s:.0f} s"


def _rate(arrivals: Sequence[Arrival]) -> float:
    return len(arrivals) / arrivals[-1].time_s


def _real(timings: Sequence[Timings], arrivals: Sequence[Arrival], wall_s: float) -> Side:
    def mean(values: Sequence[float | None]) -> float:
        return fmean([value for value in values if value is not None] or [0.0])

    return Side(
        mean_ttft_s=mean([t.ttft for t in timings]),
        mean_tpot_s=mean([t.tpot for t in timings]),
        mean_e2e_s=mean([t.e2e for t in timings]),
        output_tokens_per_s=sum(a.num_output_tokens for a in arrivals) / wall_s,
    )


def _simulated(result: RunResult) -> Side:
    outcomes = result.outcomes
    tpot = outcomes.tpot_s[outcomes.num_output_tokens > 1]
    return Side(
        mean_ttft_s=float(outcomes.ttft_s.mean()),
        mean_tpot_s=float(tpot.mean()) if len(tpot) else 0.0,
        mean_e2e_s=float(outcomes.e2e_s.mean()),
        output_tokens_per_s=float(outcomes.num_output_tokens.sum()) / result.simulated_s,
    )


def _step_error(steps: Sequence[MeasuredStep], cost: str) -> float:
    """How far off the cost model was of the time that the real steps took, all together: the machine's drift is in it."""
    clock = StepClock(load_cost(cost).seconds)
    return sum(clock.of(step.work) for step in steps) / sum(step.stats.total_s for step in steps) - 1


def _dict(side: Side) -> dict[str, float]:
    return {name: getattr(side, name) for name in side.__slots__}


ROWS: Final = (
    ("mean TTFT", "mean_ttft_s", 1000.0, "ms"),
    ("mean TPOT", "mean_tpot_s", 1000.0, "ms"),
    ("mean latency", "mean_e2e_s", 1000.0, "ms"),
    ("throughput", "output_tokens_per_s", 1.0, "tokens/s"),
)


def text(found: dict[str, Any]) -> str:
    lines = [f"{'':<14}{'real':>12}{'simulated':>12}{'error':>9}"]
    for title, key, factor, unit in ROWS:
        real, said = factor * found["real"][key], factor * found["simulated"][key]
        lines.append(f"{title:<14}{real:>12,.1f}{said:>12,.1f}{found['errors'][key]:>+9.1%} {unit}")
    lines.append(
        f"{found['requests']} requests at {found['offered_requests_per_s']:.2f}/s; {found['steps']['real']} real and "
        f"{found['steps']['simulated']} simulated steps; the real steps' time is off by {found['step_error']:+.1%}"
    )
    return "\n".join(lines)
