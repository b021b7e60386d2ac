"""A renderer that fails, in every way, under 32 running calls: one call ends with its name, 31 are unhurt."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from core.errors import ConfigError, GenerationError, OverloadedError, RequestError
from core.front import render_threads
from core.isolation.front import FrontLimits
from core.stages.renderer import RenderedPrompt, TextPrompt, TokenPrompt
from core.testing import isolation
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request
from core.testing.isolation import (
    MARK,
    QUICK,
    VICTIM_PROMPT,
    Around,
    boom,
    leave,
    raising,
    returning,
    run_all,
    unspeakable,
    victim,
)
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
check = partial(isolation.check, Fcfs)
NAN = math.nan


def rendering(act):
    def render(inner, prompt):
        is_marked = isinstance(prompt, TokenPrompt) and prompt.token_ids[0] == MARK
        return act(inner, prompt) if is_marked else inner.render(prompt)

    return lambda inner: Around(inner, render=render)


def preparing(act):
    def prepare(inner, params):
        return act(inner, params) if params.seed == 13 else inner.prepare(params)

    return lambda inner: Around(inner, prepare=prepare)


def with_params(**values):
    return lambda inner, params: msgspec.structs.replace(params, **values)


def mutated_prompt(inner, prompt):
    rendered = inner.render(prompt)
    prompt.token_ids.append(1)
    return rendered


def mutated_params(inner, params):
    params.logit_bias[3] = 100.0
    return inner.prepare(params)


class BadStatus(RequestError):
    def __init__(self):
        pass


RENDERER = {
    "raise": (boom, "RuntimeError: boom"),
    "SystemExit": (leave, "SystemExit: 3"),
    "CancelledError": (raising(asyncio.CancelledError()), "CancelledError"),
    "StopIteration": (raising(StopIteration()), "StopIteration"),
    "an error without a text": (unspeakable, "UnspeakableError: an error without a text"),
    "an error of ours that is not its own": (raising(ConfigError("x")), "ConfigError: x"),
    "a refusal with a wrong status": (raising(RequestError("x", status="404")), "RequestError: x"),
    "a refusal without fields": (raising(BadStatus()), "BadStatus"),
    "an overload of NaN seconds": (raising(OverloadedError("x", retry_after=NAN)), "OverloadedError: x"),
    "None": (returning(None), "render returned None"),
    "bare ids": (returning([1, 2]), "render returned a list"),
    "a tuple": (returning(RenderedPrompt((1, 2))), "render returned token ids that are no list of integers"),
    "text": (returning(RenderedPrompt(["1"])), "render returned token ids that are no list of integers"),
    "bools": (returning(RenderedPrompt([True])), "render returned token ids that are no list of integers"),
    "NaN": (returning(RenderedPrompt([1, NAN])), "render returned token ids that are no list of integers"),
    "no ids": (returning(RenderedPrompt([])), "render returned token ids that are none"),
    "past the vocabulary": (returning(RenderedPrompt([50])), "render returned token ids that are none, or not all"),
    "below zero": (returning(RenderedPrompt([-1])), "render returned token ids that are none, or not all"),
    "a number as text": (returning(RenderedPrompt([1], NAN)), "render returned a float as the text"),
    "mutate": (mutated_prompt, "it changed the prompt that it was given"),
}


@pytest.mark.parametrize("name", RENDERER)
async def test_renderer(solo, name):
    act, reason = RENDERER[name]
    await check(solo, "renderer", rendering(act), reason=reason)


PREPARE = {
    "raise": (boom, "RuntimeError: boom"),
    "None": (returning(None), "prepare returned params whose params are None"),
    "a dict": (returning({}), "prepare returned params whose params are a dict"),
    "NaN": (with_params(temperature=NAN), "prepare returned params whose temperature is nan"),
    "wrong type": (with_params(top_k="x"), "prepare returned params whose params are malformed"),
    "other n": (with_params(n=2), "prepare made n=2 of n=1"),
    "mutate": (mutated_params, "it changed the params that it was given"),
}


@pytest.mark.parametrize("name", PREPARE)
async def test_renderer_prepare(solo, name):
    act, reason = PREPARE[name]
    await check(solo, "renderer", preparing(act), bad=victim(seed=13), reason=reason)


async def test_renderer_that_blocks(solo, monkeypatch):
    monkeypatch.setattr(render_threads, "PATIENCE_S", 0.02)
    release = threading.Event()

    def block(inner, prompt):
        release.wait(20)
        return inner.render(prompt)

    async with Harness(wrap={"renderer": rendering(block)}, limits=QUICK) as h:
        stuck = [asyncio.ensure_future(h.answer(replace(victim(), request_id=f"stuck{i}"))) for i in range(5)]
        await asyncio.sleep(0.05)
        outcome, rest = await run_all(h)
        assert rest == solo
        for error in (outcome, *await asyncio.gather(*stuck, return_exceptions=True)):
            assert str(error) == "renderer=chaos (plugin chaos, acme 1.0): no answer within 0.4 s"
        (incident,) = h.front.incidents()
        assert incident.failures == 12  # six blocks, and six that were given up
        release.set()
        await h.assert_whole()
        assert ids_of(await h.answer(request("later"))) == oracle()


async def test_when_every_thread_is_stuck_the_answer_is_overloaded(monkeypatch):
    monkeypatch.setattr(render_threads, "PATIENCE_S", 0.01)
    monkeypatch.setattr(render_threads, "MAX_THREADS", 3)
    release = threading.Event()
    block = rendering(lambda inner, prompt: (release.wait(20), inner.render(prompt))[1])
    async with Harness(wrap={"renderer": block}, limits=FrontLimits(render_timeout=20)) as h:
        stuck = [asyncio.ensure_future(h.answer(replace(victim(), request_id=f"stuck{i}"))) for i in range(3)]
        await asyncio.sleep(0.2)
        with pytest.raises(OverloadedError, match="3 prompts"):
            await h.answer(request())
        stuck[0].cancel()
        await asyncio.gather(stuck[0], return_exceptions=True)
        with pytest.raises(OverloadedError):  # a client that left does not free the thread
            await h.answer(request())
        release.set()
        assert [ids_of(o) for o in await asyncio.gather(*stuck[1:])] == [oracle(VICTIM_PROMPT, 12)] * 2
        assert ids_of(await h.answer(request())) == oracle()
        await h.assert_whole()


async def test_threads_that_replaced_stuck_ones_end():
    before = threading.active_count()
    async with Harness() as h:
        await asyncio.gather(*(h.answer(request(f"r{i}")) for i in range(40)))
        assert sum(thread.name == "renderer" for thread in threading.enumerate()) <= 2
    for _ in range(100):
        if threading.active_count() <= before:
            break
        await asyncio.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "renderer"]


async def test_a_refusal_of_the_renderer_is_the_clients():
    async with Harness(wrap={"renderer": rendering(raising(RequestError("no", param="prompt", status=413)))}) as h:
        with pytest.raises(RequestError) as caught:
            await h.answer(victim())
        assert caught.value.status == 413
        assert h.front.incidents() == ()


async def test_a_renderer_that_keeps_its_list_harms_nobody():
    kept = []

    def render(inner, prompt):
        kept[:] = prompt.token_ids
        return RenderedPrompt(kept)

    async with Harness(wrap={"renderer": lambda inner: Around(inner, render=render)}) as h:
        calls = [request(f"r{i}", (8 + i, 9, 10)) for i in range(6)]
        answers = await asyncio.gather(*map(h.answer, calls))
        kept.clear()
        assert [ids_of(answer) for answer in answers] == [oracle((8 + i, 9, 10)) for i in range(6)]


async def test_tokenize_goes_the_same_way():
    async with Harness(wrap={"renderer": lambda inner: Around(inner, render=boom)}) as h:
        with pytest.raises(GenerationError, match=r"^renderer=chaos .*boom"):
            await h.front.render(TextPrompt("hello"))
        with pytest.raises(GenerationError, match=r"^frontend=chaos "):
            await h.front.render(["hello"])


def no_thread(thread):
    raise RuntimeError("can't start new thread")


async def test_a_thread_that_cannot_be_started_turns_one_call_away(monkeypatch):
    """Neither its place nor its thread counts as taken afterwards."""
    async with Harness() as h:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            for _ in range(5):
                with pytest.raises(OverloadedError, match="cannot be rendered: RuntimeError: can't start"):
                    await asyncio.wait_for(h.answer(request()), 5)
        assert ids_of(await h.answer(request())) == oracle()
        assert h.front._intake._threads._num_busy == 0
