"""A whole pipeline in one process, assembled from config overrides as a user would write them, for end-to-end tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from core.assembly import build_front, make_engine, read_model
from core.batch import TokenLogprobs
from core.border.inline_client import InlineClient
from core.engine import Engine
from core.front.front import Front
from core.outputs import RequestOutput, StepStats, Usage
from core.request import FinishReason, SamplingParams
from core.session import Session, open_session
from core.stages.frontend import GenerateRequest
from core.stages.renderer import ChatPrompt, Prompt, TextPrompt, TokenPrompt

IDLE_TIMEOUT = 20.0  # seconds


@dataclass(slots=True)
class AnsweredChoice:
    """One choice of an answer, its deltas joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A call that has ended."""

    prompt_token_ids: list[int]
    choices: tuple[AnsweredChoice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    num_outputs: int  # how many deltas it came in

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.token_ids

    @property
    def text(self) -> str:
        """Of the only choice."""
        (choice,) = self.choices
        return choice.text


class RunningPipeline:
    """Front and engine, and the numbers of every step that ran something."""

    def __init__(self, session: Session):
        self.session = session
        self.steps: list[StepStats] = []
        self._engine: Engine | None = None
        spec = read_model(session.settings)
        self.client = InlineClient(self._make_engine, probe_timeout=600.0, close_timeout=60.0)
        pipeline = build_front(session.description, session.settings, session.plugins, spec, self._num_kv_slots)
        pipeline.observers.add_taps([self._keep])
        self.front = Front(pipeline, self.client, time.monotonic)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the pipeline has not started"
        return self._engine

    def _make_engine(self) -> Engine:
        engine = make_engine(self.session.settings, self.session.plugins, description=self.session.description)
        assert isinstance(engine, Engine)
        self._engine = engine
        return engine

    def _num_kv_slots(self) -> int:
        info = self.client.info
        return info.num_kv_slots or info.num_kv_blocks * info.block_size

    def _keep(self, stats: StepStats) -> None:
        if stats.num_requests:
            self.steps.append(stats)

    async def answer(self, call: GenerateRequest) -> Answered:
        """Run one call to its end."""
        async with aclosing(self.front.generate(call)) as deltas:
            return joined([output async for output in deltas])

    async def answer_all(self, calls: Iterable[GenerateRequest]) -> list[Answered]:
        """Run calls at once: they are admitted together and share steps."""
        answers = await self.front.generate_many(list(calls))
        outputs = await asyncio.gather(*(_collected(answer) for answer in answers))
        return [joined(found) for found in outputs]

    async def answer_each(self, calls: Iterable[GenerateRequest]) -> list[Answered]:
        """Run calls one after the other: each has the engine to itself."""
        return [await self.answer(call) for call in calls]

    async def assert_whole(self) -> None:
        """Everything that requests held is back: blocks, queues, per-request state on both sides. Waits until idle."""
        engine, front = self.engine, self.front
        deadline = time.monotonic() + IDLE_TIMEOUT
        while engine.has_work() or front.load().in_flight:
            assert time.monotonic() < deadline, "requests are still in flight"
            await asyncio.sleep(0.005)
        cache = engine._pipeline.cache
        assert cache.num_free_blocks == cache.num_blocks
        cache.check()
        tables = (engine._prompt_logprobs, front._calls, front._choices)
        assert not any(tables), tables
        assert not any(engine._scheduler.counts()), engine._scheduler.counts()


async def _collected(deltas: Any) -> list[RequestOutput]:
    return [output async for output in deltas]


@asynccontextmanager
async def running(*overrides: str) -> AsyncIterator[RunningPipeline]:
    """`async with running("model.source=…", "cache.num_blocks=9") as pipeline`. Checks at the end that all is whole."""
    async with running_session(open_session(["process.separate=false", *overrides])) as pipeline:
        yield pipeline


@asynccontextmanager
async def running_session(session: Session) -> AsyncIterator[RunningPipeline]:
    """The same for a session whose parts a test has changed."""
    pipeline = RunningPipeline(session)
    await pipeline.front.start(lambda what, done, total: None)
    try:
        yield pipeline
        await pipeline.assert_whole()
    finally:
        await pipeline.front.close()


def joined(outputs: Sequence[RequestOutput]) -> Answered:
    """Deltas -> answer. Asserts that the call ended once."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert last.usage is not None
    parts = [part for output in outputs for part in output.outputs]
    choices = [AnsweredChoice() for _ in range(1 + max(part.index for part in parts))]
    for part in parts:
        choice = choices[part.index]
        assert choice.finish_reason is None, "a delta after the last one"
        choice.token_ids += part.token_ids
        choice.text += part.text
        choice.logprobs += part.logprobs
        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
    assert all(choice.finish_reason is not None for choice in choices)
    return Answered(last.prompt_token_ids, tuple(choices), last.usage, last.prompt_logprobs, len(outputs))


def call(
    key: str, prompt: Prompt | str | Sequence[int], max_tokens: int = 16, *, cache_salt: str = "", **params: Any
) -> GenerateRequest:
    """A call; greedy and, where it has no grammar, without EOS unless `params` say otherwise."""
    values: dict[str, Any] = {"temperature": 0.0, "ignore_eos": "grammar" not in params, **params}
    return GenerateRequest(
        key, _as_prompt(prompt), SamplingParams(**values), max_tokens=max_tokens, cache_salt=cache_salt
    )


def _as_prompt(prompt: Prompt | str | Sequence[int]) -> Prompt:
    if isinstance(prompt, ChatPrompt | TextPrompt | TokenPrompt):
        return prompt
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(list(prompt))
