"""`simulate fit`: what a step costs on this machine with this model, from a minute of the real engine.

Rounds of requests with one at a time, then two, four … so that prompts of all lengths come between decodes of all batch
sizes; then the terms of `core.simulation.cost` by non-negative least squares.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from core.lab.machine import machine
from core.progress import ProgressBars
from core.session import Session, open_session
from core.simulation.cost import TERMS, CostModel, Seconds
from core.simulation.course import Course, say
from core.simulation.least_squares import fitted
from core.simulation.real import OVERRIDES, MeasuredStep, RealEngine, real_engine
from core.simulation.records import Floats

COPY_BYTES: Final = 64 << 20
SHORTEST: Final = 8
OVERTIME: Final = 3.0  # times the seconds asked for, within which the first round of all batch sizes may end


class FitSettings(BaseModel):
    """`simulate fit output=cost.json +preset=chat`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    output: str = Field(description="the JSON file to write")
    seconds: float = Field(default=60.0, gt=0, le=3600, description="of measuring, about; one round at least")
    max_prompt_len: int = Field(default=1024, ge=SHORTEST, description="tokens of the longest prompt")
    max_batch: int = Field(default=32, ge=1, description="requests at once, at most")
    output_len: int = Field(default=24, ge=2, description="tokens of the longest answer")
    seed: int = Field(default=0, description="of the prompts and their lengths")


def fit(overrides: Sequence[str], settings: FitSettings) -> CostModel:
    """Measures for about a minute. Raises what a start of the engine would."""
    return asyncio.run(_fit(open_session([*OVERRIDES, *overrides]), settings))


async def _fit(session: Session, settings: FitSettings) -> CostModel:
    async with real_engine(session, ProgressBars()) as real:
        steps = await measure(real, settings)
        return cost_of(real, steps)


async def measure(real: RealEngine, settings: FitSettings) -> list[MeasuredStep]:
    """Steps of all kinds. The first requests, which warm the machine up, do not count."""
    rng = random.Random(settings.seed)
    say(_announced(real, settings))
    await _round(real, settings, rng, 2, lambda: None)
    real.steps.clear()
    began, batches = time.monotonic(), _batches(settings.max_batch)
    with Course("steps measured") as course:
        for index, batch in enumerate(cycle(batches)):
            spent = time.monotonic() - began
            if spent > settings.seconds * (1 if index >= len(batches) else OVERTIME) and real.steps:
                break
            await _round(real, settings, rng, batch, lambda: course.at(len(real.steps)))
    return list(real.steps)


def _longest(real: RealEngine, settings: FitSettings) -> int:
    """Tokens of a prompt, with room for its answer."""
    return min(settings.max_prompt_len, real.front.model.max_model_len - settings.output_len)


def _announced(real: RealEngine, settings: FitSettings) -> str:
    return (
        f"measuring steps for about {settings.seconds:g} s, on a slow machine up to {settings.seconds * OVERTIME:g} s: requests "
        f"of up to {_longest(real, settings):,} and {settings.output_len} tokens, up to {settings.max_batch} at a time"
    )


def _batches(most: int) -> list[int]:
    """1, 2, 4 … and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


async def _round(
    real: RealEngine, settings: FitSettings, rng: random.Random, batch: int, on_end: Callable[[], object]
) -> None:
    """Twice `batch` requests, `batch` of them at a time: a prompt comes where an answer has ended, between decodes."""
    slots, model = asyncio.Semaphore(batch), real.front.model
    longest = _longest(real, settings)
    low, high = model.vocab_size // 10, max(model.vocab_size * 9 // 10, model.vocab_size // 10 + 1)

    async def one(index: int) -> None:
        length = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        prompt, num_output = [rng.randrange(low, high) for _ in range(length)], rng.randint(2, settings.output_len)
        async with slots:
            await real.generate(f"fit-{batch}-{index}", prompt, num_output)
        on_end()

    await asyncio.gather(*(one(index) for index in range(2 * batch)))


def cost_of(real: RealEngine, steps: Sequence[MeasuredStep]) -> CostModel:
    """The model of this machine, and how well it says what was measured."""
    features, seconds = columns(steps)
    coefficients = fitted(features, seconds)
    terms = dict(zip(TERMS, coefficients.tolist(), strict=True))
    pipeline, slots = real.pipelines[0], real.info.num_kv_slots
    kv_bytes = pipeline.executor.kv_bytes_per_block() * pipeline.cache.num_blocks // slots
    copy_s = kv_bytes * _copy_s_per_byte()
    if pipeline.cache.num_swap_blocks:
        copy_s = pipeline.executor.measure_swap() / pipeline.cache.block_size
    return CostModel(
        about=f"{real.info.model_name} in {real.info.dtype} on {real.info.device}",
        seconds=Seconds(**terms, copy_token=copy_s),
        num_kv_slots=slots,
        kv_bytes_per_token=kv_bytes,
        max_model_len=real.info.max_model_len,
        fit={
            "machine": {**machine(), "threads": torch.get_num_threads()},
            "residual": residual(features @ coefficients, seconds),
        },
    )


def columns(steps: Sequence[MeasuredStep]) -> tuple[Floats, Floats]:
    """Features [steps, terms] and seconds [steps]."""
    return np.array([step.work.features() for step in steps]), np.array([step.stats.total_s for step in steps])


def residual(predicted: Floats, seconds: Floats) -> dict[str, float]:
    """How far off the model is: of single steps, and of all of them together. Shares."""
    errors = np.abs(predicted / seconds - 1)
    return {
        "steps": len(seconds),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "total_error": float(predicted.sum() / seconds.sum() - 1),
    }


def _copy_s_per_byte() -> float:
    """Of host memory: what a copy takes on a machine whose KV lies there. The best of five."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return min(times) / COPY_BYTES


def text(cost: CostModel) -> str:
    """The terms, and how far off they are."""
    found = cost.fit["residual"]
    lines = [
        cost.about,
        *(f"  {term:<16}{1e6 * value:>12,.3f} µs" for term, value in cost.seconds.model_dump().items()),
    ]
    return "\n".join(
        (
            *lines,
            f"{found['steps']} steps: a step is off by {found['mean_error']:.1%} on average, {found['median_error']:.1%} in the "
            f"median, {found['p90_error']:.1%} at p90; all together by {found['total_error']:+.1%}",
        )
    )
