"""A frontend that makes wrong requests, changes what it is shown, or ends: nobody else is hurt, and it is named."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields, replace
from functools import partial

import pytest

from core.components import PluginRecord, Provided
from core.errors import ConfigError, GenerationError, PluginError
from core.hookspecs import Component
from core.isolation.checks import REQUEST_TYPES
from core.pipeline import Part
from core.request import SamplingParams
from core.session import _run
from core.stages.frontend import GenerateRequest
from core.stages.renderer import ChatPrompt, RenderedPrompt, TextPrompt, TokenPrompt
from core.stages.tool_parser import NoTools
from core.testing import isolation
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request
from core.testing.isolation import (
    Around,
    UnspeakableError,
    victim,
)
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
check = partial(isolation.check, Fcfs)
NAN = math.nan


def made(**values):
    return replace(victim(), **values)


def made_with(**values):
    return made(params=SamplingParams(**values))


FRONTEND = {
    "None": None,
    "a dict": {"prompt": "hello"},
    "a number as prompt": made(prompt=17),
    "text as prompt": made(prompt="hello"),
    "no text": made(prompt=TextPrompt(None)),
    "text as ids": made(prompt=TokenPrompt("123")),
    "no ids": made(prompt=TokenPrompt(None)),
    "a word as messages": made(prompt=ChatPrompt("hello")),
    "no messages": made(prompt=ChatPrompt(None)),
    "NaN priority": made(priority=NAN),
    "bool priority": made(priority=True),
    "huge priority": made(priority=1 << 90),
    "id": made(request_id=5),
    "half a pair": made(request_id="\ud800"),
    "NaN max_tokens": made(max_tokens=NAN),
    "bool max_tokens": made(max_tokens=True),
    "tenant": made(tenant=None),
    "stream": made(stream="yes"),
    "no params": made(params=None),
    "params as a dict": made(params={"n": 1}),
    "NaN temperature": made_with(temperature=NAN),
    "negative temperature": made_with(temperature=-1.0),
    "infinite bias": made_with(logit_bias={1: math.inf}),
    "no choices": made_with(n=0),
    "too many choices": made_with(n=1 << 40),
    "bool n": made_with(n=True),
    "stop of numbers": made_with(stop=(1,)),
    "extra": made_with(extra={"dry": {"x": object()}}),
}


@pytest.mark.parametrize("name", FRONTEND)
async def test_frontend_that_makes_a_wrong_request(solo, name):
    await check(solo, "frontend", None, bad=FRONTEND[name] or "nothing")


async def test_a_wrong_request_among_many_refuses_them_all():
    async with Harness() as h:
        with pytest.raises(GenerationError, match=r"^frontend=chaos "):
            await h.front.generate_many([request("a"), made(priority=NAN), request("b")])
        await h.assert_whole()


async def test_lists_that_a_frontend_changes_afterwards_change_nothing():
    async with Harness() as h:
        prompt, bias = [8, 9, 10], {2: 0.0}
        call = GenerateRequest("a", TokenPrompt(prompt), request(logit_bias=bias).params, max_tokens=300)
        stream = h.front.generate(call)
        first = await anext(stream)
        prompt.clear()
        bias[3] = NAN
        first.prompt_token_ids.clear()
        rest = [output async for output in stream]
        assert ids_of([first, *rest]) == oracle(max_tokens=300)
        assert [first, *rest][-1].usage.prompt_tokens == 3
        (kept,) = await h.front.enter([request("b")])
        assert kept.sequences[0].prompt_token_ids is not kept._shown_prompt
        h.front.leave(kept)
        await h.assert_whole()


async def test_messages_that_a_renderer_changes_are_not_the_clients():
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]

    def render(inner, prompt):
        prompt.messages[0]["content"][0]["text"] = "changed"
        return RenderedPrompt([8, 9, 10])

    async with Harness(wrap={"renderer": lambda inner: Around(inner, render=render)}) as h:
        call = replace(request(), prompt=ChatPrompt(messages, template_kwargs={"a": [1]}))
        with pytest.raises(GenerationError, match="it changed the prompt"):
            await h.answer(call)
        assert messages[0]["content"][0]["text"] == "hello"


def test_every_field_of_a_request_is_checked():
    assert {field.name for field in fields(GenerateRequest)} == {*REQUEST_TYPES, "prompt", "params"}


PART = Part(
    "frontend",
    Provided("frontend", Component("chaos", "chaos:Chaos", ""), PluginRecord("chaos", "acme", "1.0", "loaded")),
    NoTools.Settings(),
)


class Server:
    def __init__(self, error):
        self._error = error

    async def run(self):
        raise self._error


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), SystemExit(3), OSError(28, "No space left"), UnspeakableError()]
)
def test_a_frontend_that_ends_with_an_error_is_named_in_one_line(error):
    with pytest.raises(PluginError) as caught:
        asyncio.run(_run(Server(error), PART))
    line = str(caught.value)
    assert line.startswith(f"frontend=chaos (plugin chaos, acme 1.0) ended: {type(error).__name__}: ")
    assert "\n" not in line


@pytest.mark.parametrize("error", [ConfigError("frontend.port: taken"), BrokenPipeError(), KeyboardInterrupt()])
def test_what_says_by_itself_what_happened_passes(error):
    with pytest.raises(type(error)):
        asyncio.run(_run(Server(error), PART))
