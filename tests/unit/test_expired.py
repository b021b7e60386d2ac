"""Requests that were not scheduled before their deadline: one answer to the client, and nothing left on either side."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import pytest

from core.batch import ModelBatch
from core.errors import OverloadedError
from core.outputs import RequestOutput
from core.request import FinishReason
from core.stages.frontend import GenerateRequest
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request
from core.testing.isolation import Around
from plugins.schedulers.fcfs import Fcfs


class OneAtATime(Fcfs):
    class Settings(Fcfs.Settings):
        max_num_running_reqs: int = 1


def slowly(batch: ModelBatch) -> None:
    time.sleep(0.002)


Harness = partial(FrontHarness, OneAtATime, fault=slowly)


def timed(key: str, ttl: float | None, **values: Any) -> GenerateRequest:
    made = request(key, **values)
    return GenerateRequest(key, made.prompt, made.params, max_tokens=made.max_tokens, ttl=ttl, tenant="gold")


async def running(h: FrontHarness) -> asyncio.Task[list[RequestOutput]]:
    """A long answer that has begun."""
    task = asyncio.ensure_future(h.answer(timed("long", None, max_tokens=400)))
    while not h.front.load().running:
        await asyncio.sleep(0.002)
    return task


@pytest.mark.parametrize("n", [1, 3])
async def test_it_ends_as_overloaded_and_is_counted_once(n: int) -> None:
    async with Harness() as h:
        first = await running(h)
        with pytest.raises(OverloadedError, match="try again later") as caught:
            await h.answer(timed("late", 0.05, n=n))
        assert 1 <= caught.value.retry_after <= 60
        assert not first.done(), "the one that runs was not waited for"
        assert ids_of(await first) == oracle(max_tokens=400)
        reasons = {record.request_id: record.finish_reasons for record in await h.seen()}
        assert reasons == {"late": (FinishReason.EXPIRED,) * n, "long": (FinishReason.LENGTH,)}
        (late,) = [record for record in h.records if record.request_id == "late"]
        assert late.usage.completion_tokens == 0 and late.timings.queue is None and late.error
        await h.assert_whole()


async def test_one_that_runs_has_no_deadline_any_more() -> None:
    async with Harness() as h:
        answer = await h.answer(timed("a", 0.2, max_tokens=300))
        assert ids_of(answer) == oracle(max_tokens=300)
        await h.assert_whole()


async def test_the_timeout_of_the_admission_holds_for_all() -> None:
    async with Harness(queue_timeout=0.05) as h:
        first = await running(h)
        for ttl in (None, 30.0):
            with pytest.raises(OverloadedError):
                await h.answer(timed("late", ttl))
        await first
        await h.assert_whole()


async def test_in_a_call_of_several_prompts_one_answer_ends_all() -> None:
    async with Harness() as h:
        first = await running(h)
        calls = await h.front.generate_many([timed("a", 0.05), timed("b", 0.05)])
        with pytest.raises(OverloadedError):
            await anext(calls[0])
        await calls[1].aclose()
        await first
        await h.assert_whole()


async def test_a_client_that_left_before_is_an_abort() -> None:
    async with Harness() as h:
        first = await running(h)
        (call,) = await h.front.enter([timed("late", 0.1)])
        h.front.leave(call)
        await asyncio.sleep(0.2)
        await first
        assert [r.finish_reasons for r in await h.seen() if r.request_id == "late"] == [(FinishReason.ABORT,)]
        await h.assert_whole()


async def test_an_admission_of_api_1_1_knows_of_no_ttl_and_it_holds() -> None:
    """It makes its sequences without a deadline."""

    def admit(inner: Any, *arguments: Any) -> Any:
        return tuple(msgspec.structs.replace(one, deadline=None) for one in inner.admit(*arguments))

    async with Harness(wrap={"admission": lambda inner: Around(inner, admit=admit)}) as h:
        first = await running(h)
        with pytest.raises(OverloadedError):
            await h.answer(timed("late", 0.05))
        await first
        await h.assert_whole()
