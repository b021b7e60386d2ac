"""Stage spans of real requests on a tiny model: all nine, no gap, and at least 95 % of the time a caller waited."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from core.components import STAGES
from core.errors import GenerationError, RequestError
from core.observers import Named
from core.outputs import RequestRecord, StageSpan, StepStats
from core.request import FinishReason
from core.stages.renderer import ChatPrompt
from core.testing.harness.pipelines import RunningPipeline, call, running
from core.testing.tiny_models import make_tiny_model

PROMPT = "The engine was described as one engine. " * 8


class Records:
    """An observer that keeps the records of ended requests."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def step_finished(self, stats: StepStats) -> None:
        pass

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class Traced(Records):
    """Added to a pipeline before it starts; `of` waits for the records of calls that have ended."""

    def __init__(self, pipeline: RunningPipeline):
        super().__init__()
        self._observers = pipeline.front.observers

    async def of(self, *ids: str) -> list[RequestRecord]:
        await self._observers.flush(10)
        found = {record.request_id: record for record in self.records}
        return [found[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tiny = make_tiny_model(tmp_path_factory.mktemp("spans") / "tiny")
    return [f"model.source={tiny}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=256"]


def traced(pipeline: RunningPipeline) -> Traced:
    """The pipeline has started: the observer's thread is started here."""
    seen = Traced(pipeline)
    pipeline.front.observers.add(Named("traced", "test", seen))
    return seen


def covered(spans: tuple[StageSpan, ...]) -> float:
    """Seconds of the union."""
    total, reached = 0.0, spans[0].start
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.end - max(span.start, reached), 0.0)
        reached = max(reached, span.end)
    return total


def check(record: RequestRecord, stages: tuple[str, ...] = STAGES) -> None:
    """The sequential stages follow one another; all lie in the request; the stage is busy no longer than its span."""
    assert tuple(span.stage for span in record.spans) == stages
    spans = {span.stage: span for span in record.spans}
    in_turn = [
        spans[stage]
        for stage in ("frontend", "renderer", "admission", "scheduler", "prefill", "decode")
        if stage in spans
    ]
    assert all(one.end == two.start for one, two in pairwise(in_turn))
    start, end = record.spans[0].start, record.spans[-1].end
    for span in record.spans:
        assert start <= span.start <= span.end <= end
        assert 0 <= span.busy_s <= span.end - span.start
    assert covered(record.spans) == pytest.approx(end - start)


async def test_nine_spans_cover_what_a_caller_waited(overrides: list[str]) -> None:
    async with running(*overrides) as pipeline:
        seen = traced(pipeline)
        calls = [
            call("stream", PROMPT, 200),
            call("choices", PROMPT, 120, n=3, temperature=1.0, seed=1),
            call("one token", PROMPT * 4, 1),
            call("chat", ChatPrompt([{"role": "user", "content": "hello"}]), 60),
        ]
        waited: dict[str, float] = {}
        for one in calls:
            started = time.monotonic()
            await pipeline.answer(replace(one, received_time=started, trace_context="00-ab"))
            waited[one.request_id] = time.monotonic() - started
        for record in await seen.of(*waited):
            check(record)
            assert record.trace_context == "00-ab"
            busy = {span.stage: span.busy_s for span in record.spans}
            assert (
                min(
                    busy[stage] for stage in ("renderer", "admission", "scheduler", "prefill", "sampler", "detokenizer")
                )
                > 0
            )
            if record.request_id != "one token":
                assert covered(record.spans) >= 0.95 * waited[record.request_id], record
                assert busy["decode"] > busy["scheduler"]
        operations = {record.operation for record in await seen.of("stream", "chat")}
        assert operations == {"text_completion", "chat"}


async def test_a_full_batch_has_its_waiting_in_the_scheduler(overrides: list[str]) -> None:
    async with running(*overrides, "scheduler.max_num_running_reqs=1") as pipeline:
        seen = traced(pipeline)
        await pipeline.answer_all([call(name, PROMPT, 40) for name in ("first", "second")])
        first, second = await seen.of("first", "second")
        check(first)
        check(second)
        queued = {span.stage: span.end - span.start for span in second.spans}["scheduler"]
        assert queued == pytest.approx(second.timings.queue or 0, abs=0.02)
        decoding = {span.stage: span.end - span.start for span in first.spans}["decode"]
        assert queued > 0.9 * decoding, "it waited while the other one ran"


async def test_an_aborted_request_has_the_stages_that_it_reached(overrides: list[str]) -> None:
    async with running(*overrides, "scheduler.max_num_running_reqs=1") as pipeline:
        seen = traced(pipeline)
        async with aclosing(pipeline.front.generate(call("running", PROMPT, 400))) as running_call:
            await anext(running_call)
            waiting = pipeline.front.generate(call("waiting", PROMPT, 5))
            pending = asyncio.ensure_future(anext(waiting))
            await asyncio.sleep(0.1)
            await waiting.aclose()
            await asyncio.gather(pending, return_exceptions=True)
        cut, never_ran = await seen.of("running", "waiting")
        assert cut.finish_reasons == never_ran.finish_reasons == (FinishReason.ABORT,)
        check(cut)
        check(never_ran, (*STAGES[:4], "completion"))


async def test_a_refused_request_has_no_record(overrides: list[str]) -> None:
    async with running(*overrides) as pipeline:
        seen = traced(pipeline)
        with pytest.raises(RequestError):
            await pipeline.answer(call("refused", [5] * 10, max_tokens=10**6))
        await pipeline.answer(call("fine", PROMPT, 2))
        await seen.of("fine")
        assert [record.request_id for record in seen.records] == ["fine"]


async def test_a_failed_request_ends_with_its_error(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(*overrides) as pipeline:
        seen = traced(pipeline)
        detokenizer = pipeline.front._pipeline.detokenizer
        push, count = detokenizer.push, iter(range(1000))
        monkeypatch.setattr(detokenizer, "push", lambda deltas: push(deltas) if next(count) < 4 else 1 / 0)
        with pytest.raises(GenerationError):
            await pipeline.answer(call("failed", PROMPT, 100))
        monkeypatch.undo()
        (record,) = await seen.of("failed")
        check(record)
        assert record.finish_reasons == (FinishReason.ERROR,) and "ZeroDivisionError" in (record.error or "")
