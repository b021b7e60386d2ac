"""Tool calls over HTTP with a fake front: OpenAI's shapes, whole and streamed, and what a parser that fails looks like."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.pipeline import PipelineDescription
from core.request import FinishReason, GrammarSpec
from core.stages.frontend import FrontendContext
from core.stages.tool_parser import ParsedText, ToolCallDelta
from core.testing.fake_front import FakeFront, Script
from core.testing.harness.frontend_thread import serving, wait_until
from plugins.frontends.openai_http import OpenAIHttp
from plugins.tool_parsers.hermes import Hermes, HermesStream

HELLO = [{"role": "user", "content": "How warm is it in Oslo?"}]
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
BOTH = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "Oslo", "note": "{[\\"</tool_call>"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'I will look.\n{ONE}\n<tool_call>{{"name": "now"}}</tool_call>'


@pytest.fixture(scope="module")
def server():
    front = FakeFront(max_model_len=8192)
    context = FrontendContext(
        front, PipelineDescription(()), ("fake-model",), grammar_parsers=("harmony", "hermes", "mine")
    )
    with serving(OpenAIHttp(OpenAIHttp.Settings(port=0, keep_alive_seconds=5), context)) as url:
        yield front, url


@pytest.fixture
def front(server):
    front = server[0]
    front.script, front.parser = Script(), Hermes(Hermes.Settings(), None)
    front.requests.clear()
    front._incidents.__init__()
    yield front
    wait_until(lambda: not front.open)


def ask(client, **fields):
    return client.post(CHAT, json={"messages": HELLO, "max_tokens": 500, "tools": [WEATHER], **fields})


def answer(client, **fields):
    got = ask(client, **fields)
    assert got.status_code == 200, got.text
    ChatCompletion.model_validate(got.json(), strict=True)
    return got.json()


def chunks(client, **fields):
    body = {"messages": HELLO, "max_tokens": 500, "tools": [WEATHER], "stream": True, **fields}
    with client.stream("POST", CHAT, json=body) as got:
        assert got.status_code == 200, got.read()
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    found = [json.loads(line) for line in lines[:-1]]
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return found


def joined(found, index=0):
    """Content, calls and finish reasons of one choice's chunks."""
    content, calls, reasons = "", [], []
    for choice in (choice for chunk in found for choice in chunk["choices"] if choice["index"] == index):
        content += choice["delta"].get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls) and delta["type"] == "function"
                calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return content, calls, reasons


def named(calls):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_a_call_whole(client, front):
    front.script = Script(ONE)
    choice = answer(client)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert named(choice["message"]["tool_calls"]) == [("weather", ARGUMENTS)]
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")
    assert front.requests[-1].prompt.tools == [WEATHER]


def test_m1_calls_streamed_are_the_whole_ones(client, front):
    front.script = Script(TWO)
    whole = answer(client, tools=BOTH)["choices"][0]
    assert whole["message"]["content"] == "I will look.\n"
    found = chunks(client, tools=BOTH)
    content, calls, reasons = joined(found)
    assert (content, reasons) == ("I will look.\n", ["tool_calls"])
    assert named(calls) == named(whole["message"]["tool_calls"]) == [("weather", ARGUMENTS), ("now", "{}")]
    assert len({call["id"] for call in calls} | {call["id"] for call in whole["message"]["tool_calls"]}) == 4
    deltas = [d for chunk in found for d in chunk["choices"][0]["delta"].get("tool_calls", ()) if d["index"] == 0]
    assert len(deltas) > 5, "the arguments come while the model writes them"
    assert all("name" not in delta["function"] for delta in deltas[1:])


def test_choices_have_calls_of_their_own(client, front):
    front.script = Script(ONE)
    for choice in answer(client, n=3)["choices"]:
        assert named(choice["message"]["tool_calls"]) == [("weather", ARGUMENTS)]
    found = chunks(client, n=3)
    for index in range(3):
        assert named(joined(found, index)[1]) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize(
    ("text", "content"),
    [("It is warm.", "It is warm."), ("<tool_call>no json</tool_call>", None), ("<tool_call>{", None), ("  ", None)],
)
def test_text_without_calls_is_content(client, front, text, content):
    front.script = Script(text)
    choice = answer(client)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content or text, "stop")
    assert "tool_calls" not in choice["message"]
    assert joined(chunks(client)) == (content or text, [], ["stop"])


def test_m4_a_truncated_call_ends_by_length(client, front):
    front.script = Script(ONE)
    choice = answer(client, max_tokens=75)["choices"][0]
    assert choice["finish_reason"] == "length"
    ((name, arguments),) = named(choice["message"]["tool_calls"])
    assert name == "weather" and ARGUMENTS.startswith(arguments)
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    content, calls, reasons = joined(chunks(client, max_tokens=75))
    assert (content, named(calls), reasons) == ("", [("weather", arguments)], ["length"])


def test_a_call_that_is_spoilt_is_not_announced(client, front):
    front.script = Script('<tool_call>{"name": "weather", "arguments": {"city": "Oslo", x}}</tool_call>')
    choice = answer(client)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "x}}</tool_call>")


def test_other_ends_stay_what_they_are(client, front):
    front.script = Script(ONE, finish_reason=FinishReason.REPETITION)
    choice = answer(client)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "repetition")


def test_tool_choice_none_is_plain_text(client, front):
    front.script = Script(ONE)
    choice = answer(client, tool_choice="none")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ONE, "stop")
    assert front.requests[-1].prompt.tools is None


def test_logprobs_and_usage_count_every_token(client, front):
    front.script = Script(ONE)
    body = answer(client, logprobs=True, return_token_ids=True)
    choice = body["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    found = chunks(client, logprobs=True, stream_options={"include_usage": True})
    assert found[-1]["usage"] == body["usage"]
    assert sum(len(c["logprobs"]["content"]) for chunk in found for c in chunk["choices"] if c["logprobs"]) == len(
        choice["token_ids"]
    )


def test_without_a_parser_tools_are_refused_by_its_name(client, front):
    front.parser = None
    got = ask(client)
    assert got.status_code == 400
    assert got.json()["error"]["param"] == "tools" and "tool_parser=hermes" in got.json()["error"]["message"]
    assert ask(client, tool_choice="none").status_code == 200
    assert ask(client, tools=[]).status_code == 200
    assert front.open == set()


# --- calls that a grammar holds -------------------------------------------------------------------

SOURCE = {
    "structures": [{"begin": "<tool_call>", "schema": {}, "end": "</tool_call>"}],
    "triggers": ["<tool_call>"],
    "at_least_one": True,
    "stop_after_first": True,
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}


class Written(Hermes):
    """Notes what its grammar is asked for."""

    def __init__(self):
        self.asked = []

    def grammar(self, tools, choice, parallel):
        self.asked.append(([tool["function"]["name"] for tool in tools], choice, parallel))
        return GrammarSpec(kind="structural_tag", source=json.dumps(SOURCE))


class NoGrammar:
    """A parser of an older API."""

    def stream(self, tools):
        return Hermes(Hermes.Settings(), None).stream(tools)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"tool_choice": "required"}, (["weather", "now"], "required", True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (["weather", "now"], "required", False)),
        ({"tool_choice": CLOCK}, (["now"], "required", False)),
        ({"tool_choice": ALLOWED}, (["now"], "auto", True)),
        ({}, (["weather", "now"], "auto", True)),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, (["weather"], "auto", False)),
    ],
)
def test_a_grammar_holds_calls(client, front, fields, asked):
    front.parser, front.script = Written(), Script(ONE)
    choice = answer(client, **{"tools": [WEATHER, NOW], **fields})["choices"][0]
    assert front.parser.asked == [asked]
    request = front.requests[-1]
    assert (request.params.grammar.kind, json.loads(request.params.grammar.source)) == ("structural_tag", SOURCE)
    one = {("weather",): "tools[0].function.parameters", ("now",): "tools[1].function.parameters"}
    assert request.grammar_param == one.get(tuple(asked[0]), "tools")
    assert [tool["function"]["name"] for tool in request.prompt.tools][0] == "weather", "all tools are shown"
    assert all("strict" not in tool["function"] for tool in request.prompt.tools)
    assert choice["finish_reason"] == "tool_calls"
    assert named(joined(chunks(client, **{"tools": [WEATHER, NOW], **fields}))[1]) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}]
)
def test_calls_that_nothing_holds_need_no_grammar(client, front, fields):
    front.parser = Written()
    answer(client, max_tokens=5, **fields)
    assert front.parser.asked == [] and front.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [WEATHER, NOW]}, "tools[1].function.strict"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_a_parser_without_grammars_is_no_reason_to_ignore_a_field(client, front, fields, param):
    front.parser = NoGrammar()
    got = ask(client, **fields)
    assert got.status_code == 400
    error = got.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported")
    assert error["message"].endswith("; serve with tool_parser=harmony or tool_parser=hermes or tool_parser=mine.")
    assert ask(client).status_code == 200


def test_a_parser_that_knows_grammars_and_none_for_these_tools_is_not_named_as_the_remedy(client, server, front):
    front.parser = NoGrammar()
    context = FrontendContext(
        front, PipelineDescription(()), ("fake-model",), grammar_parsers=("harmony",), grammar_parser="mine"
    )
    with serving(OpenAIHttp(OpenAIHttp.Settings(port=0), context)) as url:
        got = httpx.post(url + CHAT, json={"messages": HELLO, "tools": [WEATHER, NOW]})
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, "tools[1].function.strict")
    assert "tool_parser=mine has no grammar for calls of these tools" in error["message"]
    assert error["message"].endswith("simplify them, or serve with tool_parser=harmony.")


def test_the_grammar_of_one_function_is_that_functions(client, front):
    front.parser = Written()
    answer(client, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert front.requests[-1].grammar_param == "tools[0].function.parameters"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESPONSE = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


def test_a_response_format_beside_tools_is_one_call_or_one_answer(client, front):
    front.parser, front.script = Written(), Script('{"city": "Oslo"}')
    choice = answer(client, response_format=RESPONSE)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"city": "Oslo"}', "stop")
    grammar = front.requests[-1].params.grammar
    assert front.parser.asked == [(["weather"], "required", False)]
    answers = [*SOURCE["structures"], {"begin": "", "schema": SCHEMA, "end": ""}]
    assert json.loads(grammar.source) == {**SOURCE, "structures": answers}
    answer(client, response_format={"type": "json_object"})
    assert json.loads(front.requests[-1].params.grammar.source)["structures"][-1]["schema"] == {"type": "object"}
    closed = {"disable_additional_properties": True}
    front.parser = Hermes(Hermes.Settings(), None)
    answer(client, response_format=RESPONSE, structured_outputs=closed)
    structures = json.loads(front.requests[-1].params.grammar.source)["structures"]
    assert [one["schema"]["additionalProperties"] for one in structures] == [False, False], "of calls, too"
    answer(client, response_format=RESPONSE, tool_choice="none")
    assert front.requests[-1].params.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": RESPONSE, "tool_choice": "required"}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_grammars_that_cannot_be_had_beside_tools(client, front, fields, param):
    front.parser = Written()
    got = ask(client, **fields)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_l20_a_description_changes_nothing_of_the_grammar(client, front):
    """Only what a call must be counts: its structure is the same under any wording."""
    front.parser = Hermes(Hermes.Settings(), None)
    sources = set()
    for index in range(100):
        function = {**WEATHER["function"], "description": "word " * index + '"{[<tool_call>' * (index % 3)}
        answer(client, tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=1)
        sources.add(front.requests[-1].params.grammar)
    assert len(sources) == 1


def test_the_official_client_runs_a_tool(sdk, front):
    def script(request):
        asked = any(message["role"] == "tool" for message in request.prompt.messages)
        return Script("It is 5 degrees in Oslo." if asked else TWO)

    front.script = script
    messages = list(HELLO)
    first = sdk.chat.completions.create(model="fake-model", messages=messages, tools=BOTH, max_tokens=500)
    assert first.choices[0].finish_reason == "tool_calls"
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    for call in first.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments) in ({"city": "Oslo", "note": '{["</tool_call>'}, {})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    second = sdk.chat.completions.create(model="fake-model", messages=messages, tools=BOTH, max_tokens=500)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 5 degrees in Oslo.", "stop")
    history = front.requests[-1].prompt.messages
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "tool"]
    assert history[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}


def test_the_official_client_streams_a_tool(sdk, front):
    front.script = Script(TWO)
    options = {"model": "fake-model", "messages": HELLO, "tools": BOTH, "max_tokens": 500}
    with sdk.chat.completions.stream(**options) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    assert final.finish_reason == "tool_calls" and final.message.content == "I will look.\n"
    assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS, "{}"]


# --- a parser that fails --------------------------------------------------------------------------


class Faulty:
    """Hermes until its text holds `bad`; then `act`."""

    def __init__(self, act):
        self._act = act

    def stream(self, tools):
        tools[0]["function"]["name"] = "changed"  # what it is given is its own
        return FaultyStream(tools, self._act)


class FaultyStream(HermesStream):
    def __init__(self, tools, act):
        super().__init__(tools)
        self._act = act
        self._seen = ""

    def push(self, text):
        self._seen += text
        parsed = super().push(text)
        return self._act(parsed) if "bad" in self._seen else parsed


def boom(parsed):
    raise RuntimeError("secret")


def leave(parsed):
    raise SystemExit(1)


def block(parsed):
    time.sleep(0.3)
    return parsed


FAULTS = {
    "raise": boom,
    "SystemExit": leave,
    "None": lambda parsed: None,
    "text": lambda parsed: parsed.content,
    "no text": lambda parsed: ParsedText(None),
    "NaN": lambda parsed: ParsedText(float("nan")),
    "half a pair": lambda parsed: ParsedText("\ud800"),
    "calls as a word": lambda parsed: ParsedText("", "calls"),
    "calls as dicts": lambda parsed: ParsedText("", ({"index": 0},)),
    "no name": lambda parsed: ParsedText("", (ToolCallDelta(0, arguments="{}"),)),
    "an empty name": lambda parsed: ParsedText("", (ToolCallDelta(0, name=""),)),
    "call 7": lambda parsed: ParsedText("", (ToolCallDelta(7, name="f"),)),
    "call True": lambda parsed: ParsedText("", (ToolCallDelta(True, name="f"),)),
    "named twice": lambda parsed: ParsedText("", (ToolCallDelta(0, name="f"), ToolCallDelta(0, name="f"))),
    "NaN arguments": lambda parsed: ParsedText("", (ToolCallDelta(0, name="f", arguments=float("nan")),)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_parser_that_fails_fails_the_answer_by_its_name(client, front, name):
    front.parser = Faulty(FAULTS[name])
    front.script = Script("so far so bad, and more")
    who = "tool_parser=fake (plugin fake, fake 1.0)"
    message = f"The plugin {who} failed while it ran this request."
    got = ask(client)
    assert (got.status_code, got.json()["error"]["message"]) == (500, message)
    assert got.json()["error"]["code"] == "generation_failed" and "secret" not in got.text
    with client.stream("POST", CHAT, json={"messages": HELLO, "tools": [WEATHER], "stream": True}) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    assert events[-1]["error"]["message"] == message, "one error, and nothing after it"
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    assert said and "so far so bad".startswith(said)
    (incident,) = front.incidents()
    assert (incident.failures, incident.quarantined) == (2, False)
    wait_until(lambda: not front.open)


def test_a_parser_that_fails_often_is_switched_off(client, front, sdk):
    front.parser = Faulty(boom)
    front.script = Script("bad")
    assert [ask(client).status_code for _ in range(3)] == [500] * 3
    for stream in (True, False):
        got = ask(client, stream=stream)
        assert got.status_code == 503
        error = got.json()["error"]
        assert (error["param"], error["code"], error["type"]) == ("tools", "plugin_quarantined", "server_error")
        assert "tool_parser=fake was switched off after 3 failures" in error["message"]
    with pytest.raises(openai.InternalServerError):
        sdk.chat.completions.create(model="fake-model", messages=HELLO, tools=[WEATHER])
    assert client.post(CHAT, json={"messages": HELLO}).status_code == 200
    assert ask(client, tool_choice="none").status_code == 200
    health = client.get("/health")
    assert (health.status_code, health.json()["quarantined"]) == (200, ["tool_parser=fake"])


def test_a_parser_that_cannot_open_a_stream_fails_the_answer(client, front):
    for act in (boom, lambda tools: None):
        front.parser = type("Shut", (), {"stream": staticmethod(act)})()
        assert ask(client).status_code == 500
    assert front.requests == []


def test_a_parser_that_blocks_is_reported_and_counts(client, front):
    front.parser, front.script = Faulty(block), Script("all too bad")
    front.block_timeout = 0.1
    try:
        assert answer(client)["choices"][0]["message"]["content"] == "all too bad"
    finally:
        front.block_timeout = 5.0
    (incident,) = front.incidents()
    assert incident.reason.startswith("blocked 0.3 s") and incident.failures == 1
