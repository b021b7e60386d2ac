"""A reasoning parser in the front: it fails alone, and tells where a grammar begins."""

from __future__ import annotations

import math
from functools import partial

import pytest

from core.errors import GenerationError
from core.isolation.front import FrontLimits
from core.request import GrammarSpec
from core.stages.frontend import GenerateRequest
from core.stages.reasoning_parser import PROMPT_END, ReasoningSpan, SplitText, prompt_end
from core.stages.renderer import ChatPrompt
from core.testing.harness.fake_grammars import fake_setup
from core.testing.harness.fronts import FrontHarness, request
from core.testing.isolation import QUICK, Around, boom, leave, pushed_badly, raising, returning, slow_push
from core.testing.tokenizers import byte_level_bpe
from plugins.reasoning_parsers.think import Think
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
SAID = "<think> Number NUMBER is mine. </think> It is NUMBER."


def think(**settings):
    return Think(Think.Settings(**settings), None)


class Parser:
    """Think whose streams do `act` when they are pushed the victim's text."""

    def __init__(self, act):
        self._act = act

    def stream(self, prompt):
        stream = think().stream(prompt)
        return pushed_badly(stream, self._act)


FAULTS = {
    "raise": boom,
    "SystemExit": leave,
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "wrong shape": returning({"content": ""}),
    "a tuple": returning(("", "")),
    "NaN": returning(SplitText(math.nan)),
    "half a pair": returning(SplitText(content="\ud800")),
    "block": slow_push,
}


@pytest.mark.parametrize("name", FAULTS)
async def test_one_stream_fails_alone(name):
    """Each of 32 streams gets its pieces in turn."""
    async with Harness(wrap={"reasoning_parser": lambda inner: Parser(FAULTS[name])}, limits=QUICK) as h:
        streams = {number: h.front.reasoning_parser.stream("") for number in range(32)}
        reasoning, content, failed = dict.fromkeys(streams, ""), dict.fromkeys(streams, ""), {}
        for piece in (*SAID.split(" "), None):
            for number, stream in streams.items():
                text = None if piece is None else piece.replace("NUMBER", "bad" if number == 16 else str(number)) + " "
                try:
                    split = stream.finish() if text is None else stream.push(text)
                except GenerationError as error:
                    failed.setdefault(number, str(error))
                    continue
                reasoning[number] += split.reasoning
                content[number] += split.content
        for number in set(streams) - {16}:
            assert (reasoning[number], content[number]) == (f"Number {number} is mine.", f"It is {number}. ")
        assert set(failed) == (set() if name == "block" else {16})
        assert all(text.startswith("reasoning_parser=chaos (plugin chaos, acme 1.0): ") for text in failed.values())
        assert {incident.group for incident in h.front.incidents()} == {"reasoning_parser"}


async def test_it_is_switched_off_after_a_few_failures_and_all_is_content():
    wrap = {"reasoning_parser": lambda inner: Parser(boom)}
    async with Harness(wrap=wrap, limits=FrontLimits(quarantine_after=2)) as h:
        before = h.front.reasoning_parser.stream("")
        for _ in range(2):
            with pytest.raises(GenerationError):
                h.front.reasoning_parser.stream("").push("bad")
        assert [incident.quarantined for incident in h.front.incidents()] == [True]
        assert h.front.reasoning_parser.stream("").push("<think>bad") == SplitText(content="<think>bad")
        assert h.front.reasoning_parser.span("") is None and h.front.reasoning_parser.special_tokens == ()
        assert before.push("<think>a stream that is open goes on").reasoning


@pytest.mark.parametrize(
    "span", [("<a>", "<b>"), ReasoningSpan("", ""), ReasoningSpan(5, "x"), ReasoningSpan("", "x" * 300)]
)
async def test_a_span_is_checked(span):
    wrap = {"reasoning_parser": lambda inner: Around(think(), span=lambda inner, prompt: span)}
    async with Harness(wrap=wrap) as h:
        with pytest.raises(GenerationError, match="ReasoningSpan"):
            h.front.reasoning_parser.span("")


async def test_special_tokens_are_checked():
    for found in ("<think>", [""], [5], ["x"] * 100):
        parser = type("Odd", (), {"special_tokens": found})()
        async with Harness(wrap={"reasoning_parser": lambda inner, parser=parser: parser}) as h:
            with pytest.raises(GenerationError, match="special_tokens"):
                assert h.front.reasoning_parser.special_tokens
    async with Harness(wrap={"reasoning_parser": lambda inner: object()}) as h:
        assert h.front.reasoning_parser.special_tokens == ()


async def sent_with(parser, prompt, spec):
    """The grammar that crosses to the engine."""
    sent = []
    wrap = {"reasoning_parser": lambda inner: parser}
    async with Harness(wrap=wrap, grammars=fake_setup(compile_timeout=10.0), vocab_size=400) as h:
        send = h.client.send_add
        h.client.send_add = lambda requests: (sent.extend(requests), send(requests))
        asked = request(grammar=spec, ignore_eos=False)
        if prompt is not None:
            asked = GenerateRequest("a", prompt, asked.params, max_tokens=4)
        await h.answer(asked)
    return sent[0].params.grammar


CHAT = ChatPrompt([{"role": "user", "content": "hello"}])
OPENED = ChatPrompt([{"role": "assistant", "content": "<think>\n"}], False, True)
CLOSED = ChatPrompt([{"role": "assistant", "content": "<think>\n\n</think>\n\n"}], False, True)
SPEC = GrammarSpec(kind="regex", source="text")


async def test_a_grammar_begins_where_the_reasoning_ends():
    found = await sent_with(think(), CHAT, SPEC)
    assert (found.after, found.opening, found.artifact) == ("</think>", "<think>", b"text")
    found = await sent_with(think(), OPENED, SPEC)
    assert (found.after, found.opening) == ("</think>", "")


async def test_a_grammar_begins_at_once_where_there_is_no_reasoning():
    for parser, prompt in ((think(), CLOSED), (think(), None)):
        found = await sent_with(parser, prompt, SPEC)
        assert (found.after, found.opening, found.artifact) == ("", "", b"text")


async def test_a_grammar_that_says_where_it_begins_is_left_alone():
    spec = GrammarSpec(kind="regex", source="text", after="<call>", may_end=True)
    found = await sent_with(think(), CHAT, spec)
    assert (found.after, found.opening, found.may_end) == ("<call>", "", True)


def test_a_parser_sees_the_end_of_the_prompt_with_its_special_tokens():
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("a" * 500 + "<|im_start|>assistant\n<think>\n")
    assert len(ids) > PROMPT_END
    end = prompt_end(tokenizer, ids)
    assert end.endswith("<|im_start|>assistant\n<think>\n") and len(end) < 200
    assert prompt_end(tokenizer, []) == ""
