"""Reasoning over HTTP with a fake front: under both of its names, whole and streamed, beside tool calls, and counted."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from core.pipeline import PipelineDescription
from core.stages.frontend import FrontendContext
from core.stages.tool_parser import ToolParserContext
from core.testing.engines import fake_spec
from core.testing.fake_front import FakeFront, Script
from core.testing.harness.frontend_thread import serving, wait_until
from plugins.frontends.openai_http import OpenAIHttp
from plugins.reasoning_parsers.think import Think
from plugins.tool_parsers.hermes import Hermes
from plugins.tool_parsers.mistral import Mistral

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see: 5 < 7.\n</think>\n\nIt is warm.\n"


@pytest.fixture(scope="module")
def server():
    front = FakeFront(max_model_len=8192)
    context = FrontendContext(front, PipelineDescription(()), ("fake-model",))
    with serving(OpenAIHttp(OpenAIHttp.Settings(port=0, keep_alive_seconds=5), context)) as url:
        yield front, url


@pytest.fixture
def front(server):
    front = server[0]
    front.script, front.splitter, front.parser = (
        Script(),
        Think(Think.Settings(), None),
        Hermes(Hermes.Settings(), None),
    )
    front.requests.clear()
    front._incidents.__init__()
    yield front
    wait_until(lambda: not front.open)


def ask(client, **fields):
    got = client.post(CHAT, json={"messages": HELLO, "max_tokens": 500, **fields})
    assert got.status_code == 200, got.text
    return got.json()


def streamed(client, **fields):
    """(reasoning, content, calls, finish reasons, usage) of the joined chunks."""
    body = {"messages": HELLO, "max_tokens": 500, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with client.stream("POST", CHAT, json=body) as got:
        assert got.status_code == 200, got.read()
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    reasoning, content, calls, reasons, usage = "", "", "", [], None
    for chunk in map(json.loads, lines[:-1]):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert not (delta.get("reasoning_content") and content), "reasoning comes before content"
            assert delta.get("reasoning") == delta.get("reasoning_content"), "two names of one text"
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content") or ""
            calls += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return reasoning, content, calls, reasons, usage


def test_reasoning_is_told_apart_whole_and_streamed(client, front):
    front.script = Script(THOUGHT)
    body = ask(client)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see: 5 < 7.", "It is warm.\n")
    assert message["reasoning"] == message["reasoning_content"]
    assert streamed(client) == ("Let me see: 5 < 7.", "It is warm.\n", "", ["stop"], body["usage"])


def test_reasoning_tokens_are_a_part_of_the_completion_tokens(client, front):
    """Its markers are a part of it: what is left over are the tokens of the content."""
    front.script = Script(THOUGHT)
    usage = ask(client, n=2)["usage"]
    content = len(front.tokenizer.encode("It is warm.\n", add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage["completion_tokens"] - 2 * content}
    assert streamed(client, n=2)[4] == usage
    front.script = Script("<think>Hm.</think>")
    usage = ask(client)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage["completion_tokens"]}
    for text in ("It is warm.", " <thi", "<think></think>Yes."):
        front.script = Script(text)
        body = ask(client)
        assert "completion_tokens_details" not in body["usage"] and not text_of_reasoning(body)


def text_of_reasoning(body):
    message = body["choices"][0]["message"]
    return {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}


def test_reasoning_is_counted_as_it_passes(client, front, monkeypatch):
    """Encoding all of it again took 125 ms of the event loop for 100,000 characters."""
    front.script = Script("<think>" + "Let me see. " * 200 + "</think>Yes.")
    expected = ask(client, max_tokens=5000)
    encode = type(front.tokenizer).encode

    def short(tokenizer, text, *values, **named):
        assert text == front.script.text or "Let me see. Let me see." not in text, "the reasoning is encoded again"
        return encode(tokenizer, text, *values, **named)

    monkeypatch.setattr(type(front.tokenizer), "encode", short)
    assert ask(client, max_tokens=5000)["usage"] == expected["usage"]
    assert expected["usage"]["completion_tokens_details"]["reasoning_tokens"] > 500


def test_reasoning_that_is_cut_is_reasoning(client, front):
    front.script = Script(THOUGHT)
    choice = ask(client, max_tokens=12)["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert "Let me see: 5 < 7.".startswith(choice["message"]["reasoning_content"].strip())
    assert streamed(client, max_tokens=12)[:2] == (choice["message"]["reasoning_content"], "")


def test_calls_are_looked_for_behind_the_reasoning(client, front):
    front.script = Script(f"<think>I could write {CALL}</think>\n{CALL}")
    choice = ask(client, tools=[WEATHER])["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == f"I could write {CALL}" and message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Oslo"}']
    assert choice["finish_reason"] == "tool_calls"
    reasoning, content, calls, reasons, _ = streamed(client, tools=[WEATHER])
    assert (reasoning, content, calls) == (message["reasoning_content"], "", '{"city": "Oslo"}')
    assert reasons == ["tool_calls"]


@pytest.mark.parametrize("opened", [True, False])
def test_what_the_prompt_has_opened_counts(client, front, opened):
    front.script = Script("Hm.</think>Yes.")
    said = "<think>\n" if opened else "Well, "
    fields = {"messages": [*HELLO, {"role": "assistant", "content": said}], "continue_final_message": True}
    message = ask(client, **fields)["choices"][0]["message"]
    expected = ("Hm.", "Yes.") if opened else (None, "Hm.</think>Yes.")
    assert (message.get("reasoning_content"), message["content"]) == expected
    assert streamed(client, **fields)[:2] == (expected[0] or "", expected[1])


def test_choices_have_reasoning_of_their_own(client, front):
    front.script = Script(THOUGHT)
    for choice in ask(client, n=3)["choices"]:
        assert choice["message"]["reasoning_content"] == "Let me see: 5 < 7."


def test_the_history_may_have_reasoning(client, front):
    front.script = Script("Yes.")
    history = [*HELLO, {"role": "assistant", "content": "Warm.", "reasoning_content": "Hm."}, *HELLO]
    ask(client, messages=history)
    assert front.requests[-1].prompt.messages[1]["reasoning_content"] == "Hm."
    got = client.post(CHAT, json={"messages": [{**HELLO[0], "reasoning_content": "Hm."}]})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "messages[0].reasoning_content")


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
def test_templates_get_the_reasoning_of_the_history_under_both_names(client, front, names):
    front.script = Script("Yes.")
    history = [*HELLO, {"role": "assistant", "content": "Warm.", **dict.fromkeys(names, "Hm.")}, *HELLO]
    ask(client, messages=history)
    message = front.requests[-1].prompt.messages[1]
    assert (message["reasoning"], message["reasoning_content"]) == ("Hm.", "Hm.")
    assert "reasoning" not in front.requests[-1].prompt.messages[0]


def test_reasoning_that_says_two_things_is_refused(client, front):
    said = {"role": "assistant", "content": "", "reasoning": "Hm.", "reasoning_content": "Well."}
    for message, param in ((said, "reasoning"), ({**HELLO[0], "reasoning": "Hm."}, "reasoning")):
        got = client.post(CHAT, json={"messages": [message]})
        assert (got.status_code, got.json()["error"]["param"]) == (400, f"messages[0].{param}")


def test_the_official_client_has_it_as_an_extra_field(server, front):
    front.script = Script(THOUGHT)
    with OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0, timeout=10) as sdk:
        got = sdk.chat.completions.create(model="fake-model", messages=HELLO, max_tokens=500)
        assert got.choices[0].message.reasoning_content == "Let me see: 5 < 7."
        assert got.choices[0].message.reasoning == "Let me see: 5 < 7."  # as OpenRouter's and vLLM's examples read it
        assert got.usage.completion_tokens_details.reasoning_tokens > 0
        again = [*HELLO, got.choices[0].message.model_dump(exclude_none=True), *HELLO]
        sdk.chat.completions.create(model="fake-model", messages=again, max_tokens=500)


def test_markers_that_are_special_tokens_are_shown_to_parsers_and_to_nobody_else(client, front):
    """`<|im_start|>` is a special token of this tokenizer, and hidden."""
    front.script = Script("<|im_start|>Hm.<|im_end|>Yes.<|im_start|>")
    message = ask(client)["choices"][0]["message"]
    assert message["content"] == "Hm.Yes." and front.requests[-1].params.shown_token_ids == ()
    front.splitter = Think(Think.Settings(begin="<|im_start|>", end="<|im_end|>"), None)
    message = ask(client)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.<|im_start|>")
    assert len(front.requests[-1].params.shown_token_ids) == 2


def test_markers_of_a_tool_parser_are_shown_where_there_are_tools(client, front):
    special = "<|im_start|>"
    front.parser = type("Other", (Mistral,), {"special_tokens": (special, "[no such token]")})(
        Mistral.Settings(), ToolParserContext(fake_spec())
    )
    front.script = Script(f"{special}Yes.")
    assert ask(client)["choices"][0]["message"]["content"] == "Yes."
    assert ask(client, tools=[WEATHER])["choices"][0]["message"]["content"] == f"{special}Yes."


def test_a_parser_that_fails_fails_the_answer_by_its_name(client, front):
    class Broken(Think):
        def stream(self, prompt):
            raise RuntimeError("secret")

    front.splitter = Broken(Think.Settings(), None)
    front.script = Script(THOUGHT)
    for _ in range(3):
        got = client.post(CHAT, json={"messages": HELLO})
        assert got.status_code == 500 and "secret" not in got.text
        assert "reasoning_parser=fake (plugin fake, fake 1.0)" in got.json()["error"]["message"]
    assert ask(client)["choices"][0]["message"]["content"] == THOUGHT, "switched off, it splits no more"
