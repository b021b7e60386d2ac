"""A component of the front that fails, in every way, under 32 running calls: one call ends with its name, 31 are unhurt."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from dataclasses import fields, replace
from functools import partial

import msgspec
import pytest

from core.errors import ConfigError, GenerationError, NonetError, OverloadedError, PluginError, RequestError
from core.front import render_threads
from core.hookspecs import Component
from core.isolation.checks import REQUEST_TYPES
from core.isolation.front import FrontLimits
from core.outputs import PluginIncident
from core.pipeline import Part
from core.plugins import PluginRecord, Provided
from core.request import SamplingParams
from core.session import _run
from core.stages.frontend import GenerateRequest
from core.stages.renderer import ChatPrompt, RenderedPrompt, TextPrompt, TokenPrompt
from core.stages.tool_parser import NoTools, ParsedText, ToolCallDelta
from core.testing import isolation
from core.testing.fronts import FrontHarness, ids_of, oracle, request
from core.testing.isolation import (
    BLOCK_S,
    MARK,
    QUICK,
    VICTIM_PROMPT,
    Around,
    UnspeakableError,
    boom,
    is_victim,
    leave,
    raising,
    returning,
    run_all,
    solo_answers,
    unspeakable,
    victim,
)
from plugins.schedulers.fcfs import Fcfs
from plugins.tool_parsers.hermes import Hermes

Harness = partial(FrontHarness, Fcfs)
check = partial(isolation.check, Fcfs)
NAN = math.nan


@pytest.fixture(scope="module")
def solo():
    return solo_answers(Fcfs)


# --- renderer -------------------------------------------------------------------------------------


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


# --- admission ------------------------------------------------------------------------------------


def admitting(act):
    def admit(inner, call, token_ids, params, load):
        if not is_victim(call.request_id):
            return inner.admit(call, token_ids, params, load)
        return act(inner, call, token_ids, params, load)

    return lambda inner: Around(inner, admit=admit)


def sequences_with(**values):
    def act(inner, *arguments):
        return tuple(msgspec.structs.replace(sequence, **values) for sequence in inner.admit(*arguments))

    return act


def params_with(**values):
    def act(inner, *arguments):
        (sequence,) = inner.admit(*arguments)
        return [msgspec.structs.replace(sequence, params=msgspec.structs.replace(sequence.params, **values))]

    return act


def late_change(inner, call, token_ids, params, load):
    sequences = inner.admit(call, token_ids, params, load)
    token_ids.append(1)
    return sequences


ADMISSION = {
    "raise": (boom, "RuntimeError: boom"),
    "SystemExit": (leave, "SystemExit: 3"),
    "CancelledError": (raising(asyncio.CancelledError()), "CancelledError"),
    "None": (returning(None), "admit returned None"),
    "nothing": (returning(()), "admit returned a tuple, not one sequence for each of 1 choices"),
    "two": (lambda inner, *a: inner.admit(*a) * 2, "admit returned a tuple, not one"),
    "a generator": (lambda inner, *a: iter(inner.admit(*a)), "admit returned a tuple_iterator"),
    "words": (returning(("words",)), "admit returned a str as a sequence"),
    "another id": (sequences_with(request_id="r1~1#0"), "admit returned 'r1~1#0' as the sequence of choice 0"),
    "another choice": (sequences_with(choice=1), "admit returned"),
    "another prompt": (sequences_with(prompt_token_ids=[1]), "admit returned another prompt"),
    "NaN arrival": (sequences_with(arrival_time=NAN), "admit returned a sequence whose arrival_time is nan"),
    "NaN priority": (sequences_with(priority=NAN), "admit returned a malformed sequence"),
    "a word as priority": (sequences_with(priority="high"), "admit returned a malformed sequence"),
    "a huge seed": (sequences_with(seed=1 << 80), "admit returned a sequence whose seed"),
    "no params": (sequences_with(params=None), "admit returned a sequence whose params are None"),
    "NaN params": (params_with(min_p=NAN), "admit returned a sequence whose min_p is nan"),
    "no tokens": (params_with(max_tokens=0), "admit returned max_tokens=0"),
    "past the context": (params_with(max_tokens=1022), "admit returned max_tokens=1022 for a prompt of 3"),
    "mutate": (late_change, "it changed the prompt"),
}


@pytest.mark.parametrize("name", ADMISSION)
async def test_admission(solo, name):
    act, reason = ADMISSION[name]
    await check(solo, "admission", admitting(act), reason=reason)


async def test_admission_that_blocks_is_reported(solo):
    def slow(inner, *arguments):
        time.sleep(BLOCK_S)
        return inner.admit(*arguments)

    (incident,) = await check(solo, "admission", admitting(slow), limits=QUICK, fails=False)
    assert incident.reason.startswith("blocked 0.3 s in one call")


@pytest.mark.parametrize("act", [boom, leave, unspeakable, raising(OverloadedError("x", retry_after=math.inf))])
async def test_check_room_that_raises_fails_calls_by_name(act):
    async with Harness(wrap={"admission": lambda inner: Around(inner, check_room=act)}) as h:
        for _ in range(3):
            with pytest.raises(GenerationError, match=r"^admission=chaos "):
                await h.answer(request())
        assert [i.failures for i in h.front.incidents()] == [3]
        await h.assert_whole()


async def test_overload_and_refusal_of_the_admission_are_its_answer():
    for error in (OverloadedError("full", retry_after=2), RequestError("no", param="n")):
        async with Harness(wrap={"admission": admitting(raising(error))}) as h:
            with pytest.raises(type(error)):
                await h.answer(victim())
            assert h.front.incidents() == ()
            await h.assert_whole()


# --- frontend -------------------------------------------------------------------------------------


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


# --- tool parser ----------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]
SAID = 'Look: <tool_call>{"name": "f", "arguments": {"number": NUMBER}}</tool_call> done'


class Parser:
    """Hermes whose streams do `act` when they are pushed the victim's text."""

    def __init__(self, act):
        self._act = act

    def stream(self, tools):
        stream = Hermes(Hermes.Settings(), None).stream(tools)
        tools.clear()
        return Around(stream, push=lambda inner, text: self._act(inner, text) if "bad" in text else inner.push(text))


def slow(inner, text):
    time.sleep(BLOCK_S)
    return inner.push(text)


TOOL_FAULTS = {
    "raise": boom,
    "SystemExit": leave,
    "wrong shape": returning({"content": ""}),
    "NaN": returning(ParsedText("", (ToolCallDelta(0, name="f", arguments=NAN),))),
    "block": slow,
}


@pytest.mark.parametrize("name", TOOL_FAULTS)
async def test_tool_parser(name):
    """Each of 32 streams gets its pieces in turn."""
    async with Harness(wrap={"tool_parser": lambda inner: Parser(TOOL_FAULTS[name])}, limits=QUICK) as h:
        streams = {number: h.front.tool_parser.stream(TOOLS) for number in range(32)}
        assert len(TOOLS) == 1, "what it is given is its own"
        content, calls, failed = dict.fromkeys(streams, ""), dict.fromkeys(streams, ""), {}
        for piece in (*SAID.split(" "), None):
            for number, stream in streams.items():
                text = None if piece is None else piece.replace("NUMBER", "bad" if number == 16 else str(number)) + " "
                try:
                    parsed = stream.finish() if text is None else stream.push(text)
                except GenerationError as error:
                    failed.setdefault(number, str(error))
                    continue
                content[number] += parsed.content
                calls[number] += "".join(call.arguments for call in parsed.tool_calls)
        for number in set(streams) - {16}:
            assert content[number] == "Look:  done "
            assert json.loads(calls[number]) == {"number": number}
        assert set(failed) == (set() if name == "block" else {16})
        assert all(text.startswith("tool_parser=chaos (plugin chaos, acme 1.0): ") for text in failed.values())
        (incident,) = h.front.incidents()
        assert (incident.group, incident.failures, incident.quarantined) == ("tool_parser", 1, False)


async def test_tool_parser_is_switched_off_after_a_few_failures():
    async with Harness(wrap={"tool_parser": lambda inner: Parser(boom)}, limits=FrontLimits(quarantine_after=2)) as h:
        before = h.front.tool_parser.stream(TOOLS)
        for _ in range(2):
            with pytest.raises(GenerationError):
                h.front.tool_parser.stream(TOOLS).push("bad")
        with pytest.raises(RequestError, match="tool_parser=chaos was switched off after 2 failures") as caught:
            h.front.tool_parser.stream(TOOLS)
        assert (caught.value.status, caught.value.param) == (503, "tools")
        assert before.push("a stream that is open goes on").content
        assert [incident.quarantined for incident in h.front.incidents()] == [True]
        assert ids_of(await h.answer(request())) == oracle()


# --- incidents of the engine ----------------------------------------------------------------------


def engine_incident(reason, failures=1):
    return PluginIncident(group="sampler", name="chaos", plugin="chaos, acme 1.0", reason=reason, failures=failures)


async def test_incidents_of_the_engine_are_kept_until_the_next_engine():
    async with Harness() as h:
        step, queue = h.engine.step, [[engine_incident("one")], [engine_incident("two", 2)], []]
        h.engine.step = lambda: msgspec.structs.replace(step(), incidents=queue.pop(0) if queue else [])
        await h.answer(request())
        assert [(i.reason, i.failures) for i in h.front.incidents()] == [("two", 2)]
        h.front._incidents.lose_engine()
        assert [i.reason for i in h.front.incidents()] == ["two"]  # why it was lost, perhaps
        await h.answer(request("next"))
        assert h.front.incidents() == ()


async def test_the_engines_words_name_the_component():
    def fault(batch):
        if any(is_victim(request_id) for request_id in batch.request_ids):
            raise ValueError("poison")

    async with Harness(fault=fault) as h:
        with pytest.raises(NonetError):
            await h.answer(victim())
    error = GenerationError("sampler=chaos (plugin chaos, acme-chaos 1.0): ValueError: poison")
    assert error.part == "sampler=chaos (plugin chaos, acme-chaos 1.0)"
    assert GenerationError("ValueError: a=b (plugin c): d").part is None
