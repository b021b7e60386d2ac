"""The built-in tool parser: calls between tags, streamed as they come, under every cut of the text. Bug rows M1 to M5."""

from __future__ import annotations

import json
import random

import pytest

from core.errors import RequestError
from core.stages.tool_parser import NoTools, ToolParserContext
from core.testing.engines import fake_spec
from core.testing.harness import tool_texts as texts
from core.testing.tool_parser import ToolParserContract
from plugins.tool_parsers.call_reader import CallReader
from plugins.tool_parsers.hermes import CLOSE, OPEN, Hermes, HermesStream
from plugins.tool_parsers.json_reader import MAX_DEPTH

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]

NESTED = {
    "city": 'São "Oslo" \\ {}[]',
    "deep": [{"a": [1, -2.5e10, True, None]}, {}, []],
    "code": "if (x) { y[0] = '</tool_call>'; }\n\t",
}


def wrapped(text):
    return f"{OPEN}\n{text}\n{CLOSE}"


def call(arguments, name="f"):
    return wrapped(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def told(pieces):
    return texts.told(HermesStream(TOOLS), pieces)


class TestHermes(ToolParserContract):
    component = Hermes
    provides = frozenset({"tools", "grammar"})
    examples = {
        call(NESTED, "weather"): [("weather", NESTED)],
        call({}, "now"): [("now", {})],
        f"I look.\n{call({'a': 1}, 'now')}\n{call({'b': 2}, 'search')}": [("now", {"a": 1}), ("search", {"b": 2})],
        '<tool_call>{"name":"now"}</tool_call>': [("now", {})],
        '<tool_call>{"arguments":{"a":[1]},"name":"now"}': [("now", {"a": [1]})],
    }


class TestNone(ToolParserContract):
    component = NoTools


def test_none_says_which_parser_would_do():
    with pytest.raises(RequestError, match="tool_parser=hermes or tool_parser=mine"):
        NoTools(NoTools.Settings(), ToolParserContext(fake_spec(), ("hermes", "mine"))).stream([{}])
    with pytest.raises(RequestError, match="none is installed"):
        NoTools(NoTools.Settings(), ToolParserContext(fake_spec())).stream([{}])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 10_000])
def test_m1_arguments_are_the_text_of_the_model_under_every_cut(size):
    text = "I will look.\n" + call(NESTED) + "\n" + call({"q": '{"a": "]"}'}, "g")
    content, calls = told(texts.cut(text, size))
    assert content == "I will look.\n"
    assert calls == [("f", json.dumps(NESTED, ensure_ascii=False)), ("g", json.dumps({"q": '{"a": "]"}'}))]
    assert [json.loads(arguments) for _, arguments in calls] == [NESTED, {"q": '{"a": "]"}'}]


def test_arguments_come_while_the_model_writes_them():
    stream = HermesStream(TOOLS)
    assert stream.push('<tool_call>{"name": "f", "argum').tool_calls == ()
    assert stream.push('ents": {"text": ').tool_calls == ()  # a value has not begun: it may be no JSON at all
    (first,) = stream.push('"on').tool_calls
    assert (first.index, first.name, first.call_id, first.arguments) == (0, "f", None, '{"text": "on')
    (second,) = stream.push("ce upon").tool_calls
    assert (second.index, second.name, second.arguments) == (0, None, "ce upon")
    assert [c.arguments for c in stream.push(' a time"}}').tool_calls] == [' a time"}']
    assert stream.push("</tool_call>").tool_calls == ()


@pytest.mark.parametrize("value", ["mkdir -p test/{test1,test2", "[{", "</tool_call>", "<tool_call>", '"}}', "\\"])
def test_m3_braces_and_tags_in_strings_are_text(value):
    for size in (1, 3, 1000):
        assert told(texts.cut(call({"command": value}) + " done", size)) == (
            " done",
            [("f", json.dumps({"command": value}, ensure_ascii=False))],
        )


NO_CALLS = [
    "<tool_call>not json</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": ""}</tool_call>',
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "\\ud800"}</tool_call>',
    '<tool_call>{"name": "f", "name": "g"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {text}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "f", "id": "1"}</tool_call>',
    "<tool_call>{'name': 'f'}</tool_call>",
    '<tool_call>{"name": "f",}</tool_call>',
    '<tool_call>{"name": "f"',
    f'<tool_call>{{"name": "{"x" * 300}"}}</tool_call>',
    "<tool_call",
    "<tool_call>",
    "</tool_call>",
    " \n ",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(text):
    for around in ("", "  ", "so: "):
        for size in (1, 2, 5, 1000):
            assert told(texts.cut(around + text + around, size)) == (around + text + around, [])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"a": 1, b}}', '{"a": 1, ', "b}}"),
        ('{"a": 01}}', '{"a": 01', "}}"),
        ('{"a": nul}}', '{"a": nul', "}}"),
        ('{"a": "x\ny"}}', '{"a": "x', '\ny"}}'),
        ('{"a": "\\x"}}', '{"a": "\\', 'x"}}'),
        ('{"a": 1]}', '{"a": 1', "]}"),
        ('{"a": 1} garbage}', '{"a": 1}', " garbage}"),
        ('{"a": 1}, "b": 2}', '{"a": 1}', ', "b": 2}'),
    ],
)
def test_what_spoils_a_call_that_has_begun_is_content(text, arguments, content):
    whole = f'<tool_call>{{"name": "f", "arguments": {text}</tool_call>'
    for size in (1, 2, 3, 1000):
        assert told(texts.cut(whole, size)) == (content + "</tool_call>", [("f", arguments)])


def test_m4_a_truncated_call_keeps_what_was_told():
    text = call({"a": "xyz", "b": [1, 2]})
    begun = text.index('"xyz')
    for end in range(len(text) + 1):
        content, calls = told([text[:end]])
        if end <= begun:
            assert (content, calls) == (text[:end], [])
        else:
            ((name, arguments),) = calls
            assert (name, content) == ("f", "")
            assert json.dumps({"a": "xyz", "b": [1, 2]}).startswith(arguments)
    assert told([text[: text.index("}")]]) == ("", [("f", '{"a": "xyz", "b": [1, 2]')])


def test_white_space_around_calls_belongs_to_the_format():
    assert told([f" \n{call({})}\n\n{call({})} \n"]) == ("", [("f", "{}")] * 2)
    assert told([f"a \n{call({})}\n b \n{call({})} \n"]) == ("a \n\n b \n", [("f", "{}")] * 2)
    assert told([" \n <tool_call>no"]) == (" \n <tool_call>no", [])


LONG = [
    "[[[[(((" * 7000,
    f'{OPEN}{{"name": "f", "arguments": {{"a": ' + "[" * 50_000,
    f'{OPEN}{{"name": "f", "arguments": {{"a": "' + "x{[(" * 12_500,
    f'{OPEN}{{"name": "f", "arguments": {{"a": ' + "1" * 50_000,
    OPEN * 5000,
    f'{OPEN}{{"name": "' * 2500,
    f"{OPEN}{{" * 4000,
    " " * 50_000,
    OPEN + " " * 50_000,
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
@pytest.mark.parametrize("size", [1, 10_000])
def test_m5_each_character_is_read_once(text, size, monkeypatch):
    """As content, or as part of a call: what a model writes cannot make the parser read its text again and again."""
    num_read = 0
    feed, read_content = CallReader.feed, HermesStream._read_content

    def count_call(self, piece, at):
        nonlocal num_read
        end = feed(self, piece, at)
        num_read += end - at + self.failed
        return end

    def count_content(self, piece, at):
        nonlocal num_read
        end = read_content(self, piece, at)
        num_read += end - at - len(self._partial)
        return end

    monkeypatch.setattr(CallReader, "feed", count_call)
    monkeypatch.setattr(HermesStream, "_read_content", count_content)
    content, calls = told(texts.cut(text, size))
    assert num_read <= len(text) + text.count(OPEN)
    assert content or calls


def test_m5_nothing_is_evaluated():
    code = '__import__("os").abort()'
    assert told([wrapped(code)]) == (wrapped(code), [])
    assert told([call({"a": code})]) == ("", [("f", json.dumps({"a": code}))])


def test_m5_nesting_is_bounded():
    def nested(depth):
        return f'{OPEN}{{"name": "f", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}{CLOSE}'

    assert told([nested(MAX_DEPTH - 1)])[0] == ""
    content, ((_, arguments),) = told([nested(MAX_DEPTH)])
    assert arguments.endswith("[" * (MAX_DEPTH - 1)) and content.startswith("[")


def test_any_cut_of_any_mixture_says_the_same():
    rng = random.Random(7)
    pieces = [
        OPEN,
        CLOSE,
        call(NESTED),
        '{"name": "f"',
        '"arguments": {',
        '"a": 1',
        "}",
        " ",
        "\n",
        "text",
        "<",
        '"',
        ",",
    ]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 9)))
        whole = told([text])
        assert told(list(text)) == whole
        assert whole[1] or whole[0] == text
