"""Tools in a request's body and in a chat's history: what passes, what is refused by name, what the template gets."""

from __future__ import annotations

import json

import pytest

from core.errors import RequestError
from core.stages.renderer import ChatPrompt, RendererContext
from core.stages.text_renderer import Text
from core.testing.engines import fake_spec
from core.testing.tokenizers import byte_level_bpe
from plugins.frontends.openai_http.fields import check_fields
from plugins.frontends.openai_http.messages import chat_prompt
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.openai_http.schema import ChatBody, CompletionBody, TokenizeBody, bounded
from plugins.frontends.openai_http.settings import Bounds
from plugins.frontends.openai_http.tools import tool_use

BOUNDS = Bounds(tools=4)
CHAT, COMPLETION, TOKENIZE = (bounded(model, BOUNDS) for model in (ChatBody, CompletionBody, TokenizeBody))
HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": None}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": PARAMETERS}}


def tool(name="f", **values):
    return {"type": "function", "function": {"name": name, **values}}


def call(arguments="{}", name="weather", call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def prompt(model=CHAT, messages=HELLO, **fields):
    body = validate(model, check_fields({"messages": messages, **fields}, model.model_fields))
    return chat_prompt(body, body.messages, BOUNDS)


def refused(**fields):
    with pytest.raises(RequestError) as caught:
        prompt(**fields)
    assert caught.value.status == 400
    return caught.value


def test_tools_reach_the_prompt_as_they_were_sent():
    assert prompt(tools=[WEATHER, tool("g")]).tools == [WEATHER, tool("g")]
    assert prompt(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True).tools == [WEATHER]
    assert prompt(TOKENIZE, tools=[WEATHER]).tools == [WEATHER]
    assert prompt(tools=[tool(strict=False, description=None, parameters=None)]).tools == [tool()]


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tools": [WEATHER], "tool_choice": "none"}]
)
def test_without_tools_there_are_none(fields):
    assert prompt(**fields).tools is None


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def use(**fields):
    """What the request says of its tools, and the names of those that may be called."""
    body = validate(CHAT, check_fields({"messages": HELLO, **fields}, CHAT.model_fields))
    found = tool_use(body)
    names = [tool["function"]["name"] for tool in found.callable]
    return names, found.must_call, found.parallel, found.held_by


def test_what_the_model_may_call():
    tools = [WEATHER, tool("now"), tool("then")]
    every = ["weather", "now", "then"]
    assert use(tools=tools) == use(tools=tools, tool_choice="auto") == (every, False, True, "")
    assert use(tools=tools, tool_choice="none") == use() == ([], False, True, "")
    assert use(tools=tools, tool_choice="required") == (every, True, True, "tool_choice")
    assert use(tools=tools, tool_choice="required", parallel_tool_calls=False)[2] is False
    assert use(tools=tools, tool_choice=named("now")) == (["now"], True, False, "tool_choice")
    assert use(tools=tools, tool_choice=allowed("auto", "then", "now")) == (every[1:], False, True, "tool_choice")
    assert use(tools=tools, tool_choice=allowed("required", "now")) == (["now"], True, True, "tool_choice")
    assert use(tools=tools, parallel_tool_calls=False) == (every, False, False, "parallel_tool_calls")
    assert use(tools=[WEATHER, tool("now", strict=True)])[3] == "tools[1].function.strict"
    assert use(tools=[WEATHER, tool("now", strict=False)])[3] == ""
    assert use(tools=[tool("none"), tool("auto")], tool_choice=named("auto"))[0] == ["auto"], "a name is no word"


def test_strict_is_for_the_grammar_alone():
    body = validate(CHAT, check_fields({"messages": HELLO, "tools": [tool(strict=True)]}, CHAT.model_fields))
    assert tool_use(body).callable == [tool(strict=True)]
    assert tool_use(body).shown == prompt(tools=[tool(strict=True)]).tools == [tool()]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("weather")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": named("wether")}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": allowed("any", "weather")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [WEATHER], "tool_choice": allowed("auto", "weather", "x")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("a"), tool("b", parameters={"type": "objct"})]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"properties": {"a": {"type": "strng"}}})]}, "tools[0].function.parameters"),
        (
            {"tools": [tool(parameters={"required": "a"}, strict=True)], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool(other=1)]}, "tools[0].function.other"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("a"), tool("b", strict="yes")]}, "tools[1].function.strict"),
        ({"tools": [tool(str(i)) for i in range(5)]}, "tools"),
    ],
)
def test_wrong_tools_are_named(fields, param):
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "dict"},
        {"type": ["object", "null"]},
        {"properties": {"a": {"type": "any", "pattern": "(?<=a)b", "optional": True}}},
    ],
)
def test_a_model_may_be_shown_parameters_that_no_grammar_holds_it_to(parameters):
    assert prompt(tools=[tool(parameters=parameters)]).tools == [tool(parameters=parameters)]


def test_tools_belong_to_chats():
    with pytest.raises(RequestError, match="v1/chat/completions") as caught:
        check_fields({"prompt": "x", "tools": [WEATHER]}, COMPLETION.model_fields)
    assert caught.value.param == "tools"
    check_fields({"prompt": "x", "tools": [], "tool_choice": "none"}, COMPLETION.model_fields)


HISTORY = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [call('{"city": "Oslo"}'), call("", "now", "call_2")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5 °C"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}], "name": "now"},
    {"role": "assistant", "content": "It is cold.", "tool_calls": []},
]


def test_a_history_of_calls_passes_in_openais_shape():
    messages = prompt(messages=HISTORY).messages
    assert messages[1] == HISTORY[1]
    assert messages[2:4] == HISTORY[2:4]
    assert messages[4] == {"role": "assistant", "content": "It is cold."}
    without = {key: value for key, value in HISTORY[1].items() if key != "content"}
    assert prompt(messages=[*HELLO, without]).messages[1] == HISTORY[1]
    both = {**HISTORY[1], "content": "One moment."}
    assert prompt(messages=[*HELLO, both]).messages[1] == both


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"id": ""}, "messages[1].tool_calls[0].id"),
        ({"type": "custom"}, "messages[1].tool_calls[0].type"),
        ({"function": {"name": "f"}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": {}}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": 5, "arguments": ""}}, "messages[1].tool_calls[0].function.name"),
        ({"other": 1}, "messages[1].tool_calls[0].other"),
    ],
)
def test_wrong_calls_in_the_history_are_named(bad, param):
    assert refused(messages=[*HELLO, {"role": "assistant", "tool_calls": [{**call(), **bad}]}]).param == param


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content | string }}"
    "{% for call in message.tool_calls or [] %}"
    """<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>"""
    "{% endfor %}{{ '\n' }}{% endfor %}"
)


def renderer(template):
    tokenizer = byte_level_bpe(chat_template=template)
    return Text(Text.Settings(), RendererContext(fake_spec(tokenizer.vocab_size), tokenizer))


def test_the_template_gets_tools_and_arguments_as_objects():
    rendered = renderer(TEMPLATE).render(prompt(messages=HISTORY[:4], tools=[WEATHER]))
    lines = rendered.text.splitlines()
    assert json.loads(lines[0]) == WEATHER
    assert lines[1] == "user: Hello"
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in lines[2]
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in lines[2]
    assert "None" not in lines[2]
    assert lines[3] == "tool: 5 °C"


@pytest.mark.parametrize("arguments", ["{", "[]", "1", '{"a": NaN}', "null", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments):
    history = ChatPrompt([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}])
    with pytest.raises(RequestError) as caught:
        renderer(TEMPLATE).render(history)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_arguments_that_are_an_object_already_stay_one():
    calls = [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    text = renderer(TEMPLATE).render(ChatPrompt([{"role": "assistant", "content": "", "tool_calls": calls}])).text
    assert '"arguments": {"city": "Oslo"}' in text


def test_a_template_that_shows_no_tools_is_not_given_any():
    plain = renderer("{% for message in messages %}{{ message.content }}{% endfor %} the tools")
    with pytest.raises(RequestError, match=r"renderer.chat_template") as caught:
        plain.render(prompt(tools=[WEATHER]))
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported")
    assert plain.render(prompt()).text == "Hello the tools"
