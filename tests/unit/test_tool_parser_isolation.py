"""A tool parser that fails in one of 32 streams, and is switched off when it fails often."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from core.errors import GenerationError, RequestError
from core.isolation.front import FrontLimits
from core.request import GrammarSpec
from core.stages.tool_parser import ParsedText, ToolCallDelta
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request
from core.testing.isolation import (
    QUICK,
    boom,
    leave,
    pushed_badly,
    raising,
    returning,
    slow_push,
)
from plugins.schedulers.fcfs import Fcfs
from plugins.tool_parsers.hermes import Hermes

Harness = partial(FrontHarness, Fcfs)
NAN = math.nan


TOOLS = [{"type": "function", "function": {"name": "f"}}]
SAID = 'Look: <tool_call>{"name": "f", "arguments": {"number": NUMBER}}</tool_call> done'


class Parser:
    """Hermes whose streams do `act` when they are pushed the victim's text."""

    def __init__(self, act):
        self._act = act

    def stream(self, tools):
        stream = Hermes(Hermes.Settings(), None).stream(tools)
        tools.clear()
        return pushed_badly(stream, self._act)


TOOL_FAULTS = {
    "raise": boom,
    "SystemExit": leave,
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "wrong shape": returning({"content": ""}),
    "NaN": returning(ParsedText("", (ToolCallDelta(0, name="f", arguments=NAN),))),
    "block": slow_push,
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


async def test_the_choices_of_a_request_share_one_copy_of_its_tools():
    given = []

    class Keeps:
        def stream(self, tools):
            given.append(tools)
            return Hermes(Hermes.Settings(), None).stream(tools)

    async with Harness(wrap={"tool_parser": lambda inner: Keeps()}) as h:
        streams = h.front.tool_parser.streams(TOOLS, 3)
        assert len(set(map(id, streams))) == 3 == len(given)
        assert given[0] is given[1] is given[2] == TOOLS and given[0][0] is not TOOLS[0]


async def test_one_that_is_switched_off_is_asked_for_no_markers():
    def boom_at(tools):
        raise RuntimeError("boom")

    parser = type("Odd", (), {"special_tokens": ("<a>",), "stream": staticmethod(boom_at)})()
    async with Harness(wrap={"tool_parser": lambda inner: parser}, limits=FrontLimits(quarantine_after=1)) as h:
        assert h.front.tool_parser.special_tokens == ("<a>",)
        with pytest.raises(GenerationError):
            h.front.tool_parser.stream(TOOLS)
        assert h.front.tool_parser.special_tokens == ()


GOOD = GrammarSpec(kind="regex", source="a")


def guarded_grammar(answer):
    def grammar(tools, choice, parallel):
        tools.clear()
        return answer() if callable(answer) else answer

    return type("Parser", (), {"grammar": staticmethod(grammar)})()


async def test_a_grammar_is_checked():
    async def made(parser):
        async with Harness(wrap={"tool_parser": lambda inner: parser}) as h:
            return h.front.tool_parser.grammar(TOOLS, "auto", True)

    assert await made(guarded_grammar(GOOD)) == GOOD
    assert len(TOOLS) == 1, "what it is given is its own"
    assert await made(guarded_grammar(None)) is None
    assert await made(object()) is None, "a parser may know no grammars"
    wrong = [
        "regex",
        GrammarSpec(kind="no such kind", source="a"),
        GrammarSpec(kind="regex", source=5),
        GrammarSpec(kind="regex", source="\ud800"),
        GrammarSpec(kind="regex", after=None),
        GrammarSpec(kind="regex", source="a", any_whitespace=1),
        GrammarSpec(kind="regex", source="a", may_end=None),
        GrammarSpec(kind="regex", source="a", artifact=b"forged"),
        GrammarSpec(kind="regex", source="a", artifact=None),
        partial(boom, None, ""),
    ]
    for answer in wrong:
        with pytest.raises(GenerationError, match="tool_parser=chaos"):
            await made(guarded_grammar(answer))


async def test_special_tokens_are_checked():
    for found, expected in (
        ((), ()),
        (["<a>"], ("<a>",)),
        ("<a>", None),
        ([""], None),
        ([5], None),
        (["x"] * 100, None),
    ):
        parser = type("Odd", (), {"special_tokens": found})()
        async with Harness(wrap={"tool_parser": lambda inner, parser=parser: parser}) as h:
            if expected is None:
                with pytest.raises(GenerationError, match="special_tokens"):
                    assert h.front.tool_parser.special_tokens
            else:
                assert h.front.tool_parser.special_tokens == expected
