"""What the samplers take for a step of 32 rows, over `torch.argmax` of the same matrix: the ratio says what sampling costs beside
the least that any choice of a token costs.

Three kinds of rows: those of the model in the midst of replies, normal numbers (flat: a nucleus of half the vocabulary), and
normal numbers with one likely token. The two take turns in one run: of five turns the fastest counts, since what a machine does
besides only ever adds time, and of all these fives the median.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from core.assembly import build
from core.batch import SampledRow, SamplingMetadata
from core.request import SamplingParams
from core.session import inspect_session, open_session
from core.stages.frontend import GenerateRequest
from core.stages.renderer import ChatPrompt
from core.stages.sampler import Sampler, SamplerContext
from core.testing.harness.pipelines import RunningPipeline
from core.testing.sampler_reference import spec_of

NUM_ROWS = 32
VOCAB = 49_152
TURNS = 5  # of which the fastest counts
STEP = 12  # of the replies whose logits are taken
QUESTIONS = (
    "Write a short story about a dragon.",
    "What is the capital of France?",
    "List five fruits.",
    "Explain gravity to a child.",
    "Write a Python function that reverses a string.",
    'Give me a JSON object with the keys "name" and "age".',
    "Translate to Spanish: the train leaves at nine.",
    "Who wrote Hamlet, and when?",
)
MIXED = (
    {"top_k": 50, "top_p": 0.95},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
)
CASES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "top_k 50": ({"top_k": 50},),
    "top_k 50, top_p 0.9": ({"top_k": 50, "top_p": 0.9},),
    "min_p 0.05": ({"min_p": 0.05},),
    "top_p 0.9": ({"top_p": 0.9},),
    "top_p 0.95": ({"top_p": 0.95},),
    "a mix of these": MIXED,
    "temperature alone": ({"temperature": 0.8},),
}


@dataclass(frozen=True, slots=True)
class Cost:
    rows: str
    case: str
    num_threads: int
    sampler_ms: float  # medians
    argmax_ms: float

    @property
    def ratio(self) -> float:
        return self.sampler_ms / self.argmax_ms

    def __str__(self) -> str:
        times = f"{self.sampler_ms:6.2f} ms / {self.argmax_ms:5.2f} ms"
        return f"{self.num_threads} threads  {self.rows:8} {self.case:20} {times} = {self.ratio:5.2f}"


def model_logits(overrides: Sequence[str]) -> torch.Tensor:
    """[NUM_ROWS, V] float32 of one step in which so many replies are under way."""
    return asyncio.run(_model_logits(overrides))


async def _model_logits(overrides: Sequence[str]) -> torch.Tensor:
    taken: list[torch.Tensor] = []
    pipeline = RunningPipeline(open_session([*overrides, "process.separate=false"]))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pipeline.front.close)
        await pipeline.front.start(lambda what, done, total: None)
        executor: Any = pipeline.engine._pipeline.executor
        sample = executor._sampler.sample

        def watched(logits: torch.Tensor, metadata: SamplingMetadata) -> Any:
            if min((row.position for row in metadata.rows), default=0) >= STEP and len(metadata.rows) == NUM_ROWS:
                taken.append(logits[list(metadata.sampled_rows)].float().clone())
            return sample(logits, metadata)

        executor._sampler.sample = watched
        await pipeline.answer_all([_question(number) for number in range(NUM_ROWS)])
    return taken[0]


def _question(number: int) -> GenerateRequest:
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    params = SamplingParams(temperature=1.0, seed=number, ignore_eos=True)
    return GenerateRequest(f"r{number}", ChatPrompt(messages), params, max_tokens=4 * STEP)


def other_logits() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    flat, peaked = (torch.randn(NUM_ROWS, VOCAB, generator=generator) for _ in range(2))
    peaked.mul_(3.0)[:, 77] += 12.0
    return {"flat": flat, "peaked": peaked}


def sampler(name: str, vocab_size: int) -> Sampler:
    made: Sampler = build(
        inspect_session([f"sampler={name}"]).description.part("sampler"), SamplerContext(spec_of(vocab_size))
    )
    return made


def measure(rows: str, logits: torch.Tensor, num_threads: int, num_rounds: int) -> list[Cost]:
    """`greedy` is the sampler of that name, which greedy pipelines have; all else is `standard`."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return [_cost(rows, case, logits, num_threads, num_rounds) for case in CASES]
    finally:
        torch.set_num_threads(before)


def _cost(rows: str, case: str, logits: torch.Tensor, num_threads: int, num_rounds: int) -> Cost:
    made = sampler("greedy" if case == "greedy" else "standard", logits.shape[1])
    metadata = SamplingMetadata(tuple(range(len(logits))), tuple(_rows(CASES[case], len(logits))))
    calls: dict[str, Callable[[], object]] = {
        "argmax": lambda: torch.argmax(logits, -1),
        "sampler": lambda: made.sample(logits, metadata),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds + 1):
        fastest = dict.fromkeys(calls, float("inf"))
        for _ in range(TURNS):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                fastest[name] = min(fastest[name], time.perf_counter() - started)
        for name, seconds in fastest.items():
            times[name].append(seconds)
    sampler_s, argmax_s = (median(times[name][1:]) for name in ("sampler", "argmax"))
    return Cost(rows, case, num_threads, 1000 * sampler_s, 1000 * argmax_s)


def _rows(params: Sequence[Mapping[str, Any]], count: int) -> list[SampledRow]:
    asked = [SamplingParams(**values) for values in params]
    return [
        SampledRow(f"r{index}", asked[index % len(asked)], index, 0, 20, [1, 2, 3], list(range(20)))
        for index in range(count)
    ]
