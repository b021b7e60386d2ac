"""What every tool parser must do, as tests::

    class TestMine(ToolParserContract):
        component = Mine
        provides = frozenset({"tools"})
        examples = {'<call>{"city": "Oslo"}</call>': [("weather", {"city": "Oslo"})]}  # text -> its calls

Without examples the texts here, in formats that models write, are all that is tried: what a parser takes for no call must
come out as content, whole. Where hypothesis is installed, it looks for texts and cuts of its own.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from core.errors import RequestError
from core.isolation.tools import markers_of
from core.request import GRAMMAR_KINDS, GrammarSpec
from core.stages.tool_parser import ParsedText, ToolCallDelta, ToolParser, ToolParserContext
from core.testing.call_texts import texts_of
from core.testing.contract import Contract
from core.testing.engines import fake_spec

Call = tuple[str, Mapping[str, Any]]  # name and arguments


def _tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "…", "parameters": schema}}


TOOLS = (_tool("weather", city="string", days="integer"), _tool("search", query="string"), _tool("now"))
OTHER_TOOLS = (_tool("other", city="string"),)
ARGUMENTS = {"city": 'São "Oslo" \\ {}', "days": 3}
_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {_JSON}}}\n</tool_call>',
    f'<tool_call>{{"arguments": {_JSON}, "name": "weather"}}</tool_call>',
    f'[TOOL_CALLS][{{"name": "weather", "arguments": {_JSON}}}]',
    f"[TOOL_CALLS]weather{_JSON}",
    f'{{"name": "weather", "parameters": {_JSON}}}',
    f'<|python_tag|>{{"name": "weather", "parameters": {_JSON}}}',
    f"<function=weather>{_JSON}</function>",
    f'TOOL {{"name": "weather", "arguments": {_JSON}}}\n',
    f"```json\n{_JSON}\n```",
    '[weather(city="Oslo", days=3)]',
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>',
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
    "</tool_call>",
)
"""One call each, as models of several families write it."""

PLAIN = (
    "",
    "Hello.",
    "  leading and trailing  \n",
    "a < b and b > c, {braces} and [brackets], a `tool_call`\r\n\tand \u2028 lines",
    "漢字 🔥 👩‍👩‍👧‍👦 ďábelské \u0000 \ufffd",
    "<tool_call",
    "<tool",
    "</tool_call>",
    "[TOOL_CALL",
    "{",
    "<",
    '{"name": "no tool of these", "surname": 1}',
)
"""No call, whatever the format: half a marker, or none."""

_PIECES = (
    *CALLS,
    *PLAIN,
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|channel|>",
    "<|message|>",
    "<function=weather>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "weather(",
    "city=",
    ")",
    ";",
    '"',
    "\\",
    "}",
    "]",
    "\n",
    '{"name": "weather"',
    ",",
)


@dataclass(slots=True)
class Told:
    """What all that a stream said adds up to."""

    content: str = ""
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)

    def add(self, parsed: ParsedText) -> None:
        self.content += parsed.content
        for delta in parsed.tool_calls:
            known = self.calls.get(delta.index)
            if known is None:
                assert delta.index == len(self.calls), f"call {delta.index} begins after {len(self.calls)} calls"
                assert delta.name, "a call begins without its name"
                self.calls[delta.index] = delta
            else:
                assert delta.name is None and delta.call_id is None, "a call is named twice"
                arguments = known.arguments + delta.arguments
                self.calls[delta.index] = ToolCallDelta(known.index, known.call_id, known.name, arguments)


def chunks(text: str, rng: random.Random) -> list[str]:
    """Pieces of 1 to 12 characters."""
    pieces, start = [], 0
    while start < len(text):
        end = start + rng.randint(1, 12)
        pieces.append(text[start:end])
        start = end
    return pieces


class ToolParserContract(Contract):
    examples: ClassVar[Mapping[str, Sequence[Call]]] = {}

    @pytest.fixture
    def parser(self) -> ToolParser:
        self.needs("tools")
        return self.make_parser()

    def make_parser(self) -> ToolParser:
        parser: ToolParser = self.make(ToolParserContext(fake_spec(), ("other",)))
        return parser

    def tell(self, parser: ToolParser, pieces: Iterable[str]) -> Told:
        stream, told = parser.stream(TOOLS), Told()
        for piece in pieces:
            told.add(stream.push(piece))
        told.add(stream.finish())
        return told

    def texts(self) -> tuple[str, ...]:
        """Every example and call alone, twice, and with words around it."""
        calls = (*self.examples, *CALLS)
        around = tuple(f"Let me see. {call} Is that all?" for call in calls)
        return (*PLAIN, *calls, *(call + call for call in calls), *(f"{call}\n{call}" for call in calls), *around)

    def test_tools_are_refused_where_none_are_parsed(self) -> None:
        if "tools" in self.provides:
            assert self.make_parser().stream(TOOLS) is not None
            return
        with pytest.raises(RequestError) as caught:
            self.make_parser().stream(TOOLS)
        assert caught.value.param == "tools"

    def test_what_is_no_call_is_content(self, parser: ToolParser) -> None:
        for text in PLAIN:
            told = self.tell(parser, [text])
            assert (told.content, told.calls) == (text, {}), f"of {text!r} {told.content!r} is left"

    def test_nothing_of_a_text_is_lost(self, parser: ToolParser) -> None:
        """Content is the whole text, or all of it but the calls."""
        for text in self.texts():
            told = self.tell(parser, [text])
            if not told.calls:
                assert told.content == text, f"of {text!r} {told.content!r} is left, and no call"
            if text.startswith("Let me see."):
                words = ("Let me see.", "Is that all?")
                assert all(word in told.content for word in words), f"words around a call are lost: {told.content!r}"

    @pytest.mark.parametrize("seed", range(3))
    def test_streamed_equals_whole_under_any_chunking(self, parser: ToolParser, seed: int) -> None:
        rng = random.Random(seed)
        for text in self.texts():
            whole = self.tell(parser, [text])
            for pieces in (list(text), chunks(text, rng), [text[:1], text[1:]], [text[:-1], text[-1:]]):
                told = self.tell(parser, pieces)
                assert told == whole, f"{text!r} in the pieces {pieces} gives {told}, at once {whole}"

    def test_no_text_and_no_cut_is_too_odd(self, parser: ToolParser) -> None:
        """Texts and cuts that hypothesis finds."""
        hypothesis = pytest.importorskip("hypothesis")
        strategies = pytest.importorskip("hypothesis.strategies")
        pieces = strategies.sampled_from((*_PIECES, *self.examples)) | strategies.text(max_size=3)
        texts = strategies.lists(pieces, max_size=6).map("".join)

        def check(text: str, rng: random.Random) -> None:
            whole = self.tell(parser, [text])
            assert self.tell(parser, chunks(text, rng)) == whole
            assert self.tell(parser, list(text)) == whole
            assert whole.calls or whole.content == text, f"of {text!r} {whole.content!r} is left, and no call"

        limits = hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
        limits(hypothesis.given(texts, strategies.randoms(use_true_random=False))(check))()

    def test_a_call_of_another_tool_is_content(self, parser: ToolParser) -> None:
        for text in (*CALLS, *self.examples):
            for pieces in ([text], list(text)):
                stream, told = parser.stream(OTHER_TOOLS), Told()
                for piece in pieces:
                    told.add(stream.push(piece))
                told.add(stream.finish())
                assert (told.content, told.calls) == (text, {}), f"{text!r} calls no tool of the request"

    @pytest.mark.parametrize("choice", ["auto", "required", "weather"])
    @pytest.mark.parametrize("parallel", [True, False])
    def test_a_grammar_is_one_of_these_tools(self, choice: str, parallel: bool) -> None:
        self.needs("grammar")
        tools = copy.deepcopy(list(TOOLS))
        spec = self.make_parser().grammar(tools, choice, parallel)
        assert tools == list(TOOLS), "it changed the tools that it was given"
        if spec is not None:
            assert type(spec) is GrammarSpec and spec.kind in GRAMMAR_KINDS and spec.source
            assert type(spec.any_whitespace) is bool and type(spec.may_end) is bool and spec.artifact == b""
            assert "weather" in spec.source
            assert ("search" in spec.source) == (choice != "weather"), "another tool than the one that is asked for"

    def test_who_knows_grammars_has_one_for_plain_tools(self) -> None:
        self.needs("grammar")
        parser = self.make_parser()
        asked = [(choice, parallel) for choice in ("auto", "required", "weather") for parallel in (True, False)]
        found = [parser.grammar(copy.deepcopy(list(TOOLS)), choice, parallel) for choice, parallel in asked]
        assert any(spec is not None for spec in found), f"all of {asked} are None, and yet it provides `grammar`"

    @pytest.mark.parametrize("choice", ["auto", "required", "weather"])
    @pytest.mark.parametrize("parallel", [True, False])
    def test_its_streams_find_the_calls_that_its_grammar_allows(self, choice: str, parallel: bool) -> None:
        """Of structural tags and schemas, whose texts are written out here; a parser of other kinds walks its own."""
        self.needs("grammar")
        parser, rng = self.make_parser(), random.Random(f"{choice}{parallel}")
        spec = parser.grammar(copy.deepcopy(list(TOOLS)), choice, parallel)
        for written in () if spec is None else texts_of(spec, rng, 40):
            told = self.tell(parser, chunks(written.text, rng))
            calls = list(told.calls.values())
            assert len(calls) >= written.num_structures, f"{written.text!r} is allowed, and {told} is found in it"
            assert parallel or len(calls) == 1, f"{written.text!r} is allowed, and has {len(calls)} calls"
            for call in calls:
                assert choice != "weather" or call.name == "weather", (
                    f"{written.text!r} is allowed, and calls {call.name}"
                )
                assert json.loads(call.arguments) in written.values, f"{written.text!r} has no {call.arguments!r}"
            assert not told.content.strip(), f"{told.content!r} is left of {written.text!r}"

    def test_markers_are_a_few_texts(self) -> None:
        """`special_tokens`, where it has them: the same each time, whatever was parsed."""
        parser = self.make_parser()
        found = markers_of(parser)
        if "tools" in self.provides:
            for text in self.texts()[-6:]:
                self.tell(parser, [text])
        assert markers_of(parser) == found == markers_of(self.make_parser())
        assert len(set(found)) == len(found), f"special_tokens has a text twice: {found}"

    @pytest.mark.parametrize("seed", range(4))
    def test_no_text_is_too_odd(self, parser: ToolParser, seed: int) -> None:
        """Markers, quotes and halves of calls in any order: nothing raises, and pieces change nothing."""
        rng = random.Random(seed)
        for _ in range(60):
            text = "".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 8)))
            text = text[rng.randint(0, 5) : len(text) - rng.randint(0, 5)]
            whole, streamed = self.tell(parser, [text]), self.tell(parser, chunks(text, rng))
            assert streamed == whole, f"{text!r} streamed gives {streamed}, at once {whole}"
            assert whole.calls or whole.content == text, f"of {text!r} {whole.content!r} is left, and no call"

    @pytest.mark.parametrize("unit", ["<", "{", '"', "\\", "<tool_call>", '{"name": ', "[", "a "])
    def test_long_texts_end(self, parser: ToolParser, unit: str) -> None:
        text = unit * (20_000 // len(unit))
        assert self.tell(parser, [text]) == self.tell(parser, list(text))

    def test_a_whole_call_has_its_name_and_its_arguments(self, parser: ToolParser) -> None:
        for text in CALLS:
            for call in self.tell(parser, list(text)).calls.values():
                assert call.name == "weather"
                found = json.loads(call.arguments)
                expected = ARGUMENTS if "São" in text else {"city": "Oslo", "days": 3}
                assert found == expected, f"{text!r} has the arguments {expected}, not {found}"

    def test_examples_have_their_calls(self, parser: ToolParser) -> None:
        for text, calls in self.examples.items():
            told = self.tell(parser, list(text))
            assert [(call.name, json.loads(call.arguments)) for call in told.calls.values()] == [
                tuple(c) for c in calls
            ]

    def test_streams_do_not_mix(self, parser: ToolParser) -> None:
        texts = self.texts()[-6:]
        streams, told = [parser.stream(TOOLS) for _ in texts], [Told() for _ in texts]
        for at in range(max(map(len, texts))):
            for stream, text, one in zip(streams, texts, told, strict=True):
                if at < len(text):
                    one.add(stream.push(text[at]))
        for stream, text, one in zip(streams, texts, told, strict=True):
            one.add(stream.finish())
            assert one == self.tell(parser, [text])

    def test_the_tools_are_left_as_they_are(self, parser: ToolParser) -> None:
        tools = copy.deepcopy(list(TOOLS))
        stream = parser.stream(tools)
        for text in self.texts():
            stream.push(text)
        stream.finish()
        assert tools == list(TOOLS)
