"""Structured output over HTTP with a fake front: what reaches the pipeline, what comes back, `best_of`. Rows E, G, L."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from core.batch import TokenLogprobs
from core.errors import RequestError
from core.pipeline import PipelineDescription
from core.request import FinishReason, GrammarSpec
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeAnswer, FakeFront, Script
from core.testing.harness.frontend_thread import serving, wait_until
from plugins.frontends.openai_http import OpenAIHttp

HELLO = [{"role": "user", "content": "Who?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "Who?"}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ANSWER = '{"name": "Ada"}'


@pytest.fixture(scope="module")
def server():
    front = FakeFront(max_model_len=8192)
    context = FrontendContext(front, PipelineDescription(()), ("fake-model",))
    with serving(OpenAIHttp(OpenAIHttp.Settings(port=0), context)) as url:
        yield front, url


@pytest.fixture
def front(server):
    front = server[0]
    front.script, front.refuse = Script(ANSWER), None
    front.requests.clear()
    yield front
    wait_until(lambda: not front.open)


def ask(client, path, **fields):
    return client.post(path, json={**PROMPTS[path], "max_tokens": 100, **fields})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_grammar_and_its_field_reach_the_pipeline(client, front, path):
    assert ask(client, path, structured_outputs={"json": SCHEMA, "backend": "xgrammar"}).status_code == 200
    request = front.requests[-1]
    source = json.dumps(SCHEMA, separators=(",", ":"))
    assert request.params.grammar == GrammarSpec(kind="json_schema", source=source, backend="xgrammar")
    assert request.grammar_param == "structured_outputs.json"
    assert ask(client, path, n=3, guided_regex="a+").status_code == 200
    assert (front.requests[-1].params.n, front.requests[-1].grammar_param) == (3, "guided_regex")
    assert ask(client, path).status_code == 200
    assert (front.requests[-1].params.grammar, front.requests[-1].grammar_param) == (None, "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_field_of_the_backend_reaches_the_pipeline(client, front, path):
    newer = {"structured_outputs": {"regex": "a", "backend": "mine"}}
    for fields, param in (
        ({"guided_regex": "a", "guided_decoding_backend": "mine"}, "guided_decoding_backend"),
        (newer, "structured_outputs.backend"),
        ({**newer, "guided_decoding_backend": "mine"}, "structured_outputs.backend"),
    ):
        assert ask(client, path, **fields).status_code == 200
        request = front.requests[-1]
        assert (request.params.grammar.backend, request.grammar_backend_param) == ("mine", param)


def test_every_prompt_of_a_list_has_the_grammar(client, front):
    ask(client, COMPLETIONS, prompt=["a", "b"], guided_choice=["x", "y"])
    assert [request.params.grammar.source for request in front.requests] == ['["x","y"]'] * 2


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
def test_l12_what_no_backend_takes_is_a_400(client, front, path, stream):
    """As the front refuses it, before the first byte."""
    param = "response_format.json_schema.schema"
    front.refuse = RequestError("llguidance: unknown type", param=param, code="unsupported_grammar")
    named = {"name": "a", "schema": {"type": "stsring"}}
    got = ask(client, path, stream=stream, response_format={"type": "json_schema", "json_schema": named})
    assert (got.status_code, got.headers["content-type"]) == (400, "application/json")
    assert (got.json()["error"]["param"], got.json()["error"]["code"]) == (param, "unsupported_grammar")


def test_l13_deep_nesting_is_refused_before_anything_reads_it(client, front):
    deep = '{"not":' * 100_000 + "true" + "}" * 100_000
    body = '{"prompt": "a", "guided_json": ' + deep + "}"
    got = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert got.status_code == 400 and got.json()["error"]["code"] == "invalid_json"
    got = client.post(COMPLETIONS, json={"prompt": "a", "guided_json": deep})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "guided_json")
    assert front.requests == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_l2_a_text_that_is_cut_says_so(client, front, path):
    whole = ask(client, path, response_format={"type": "json_object"}).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    cut = ask(client, path, response_format={"type": "json_object"}, max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    text = cut["message"]["content"] if path == CHAT else cut["text"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


class Person(BaseModel):
    name: str


def test_the_official_client_parses(sdk, front):
    parsed = sdk.chat.completions.parse(model="fake-model", messages=HELLO, response_format=Person, max_tokens=99)
    assert parsed.choices[0].message.parsed == Person(name="Ada")
    assert parsed.choices[0].message.refusal is None
    grammar = front.requests[-1].params.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.source)["additionalProperties"] is False
    with sdk.chat.completions.stream(model="fake-model", messages=HELLO, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.parsed == Person(name="Ada")


# --- best_of --------------------------------------------------------------------------------------

LOGPROBS = {0: -3.0, 1: -1.0, 2: -2.0, 3: float("-inf")}  # of each token of a choice


@pytest.fixture
def ranked(front, monkeypatch):
    """Choice i says its number, at LOGPROBS[i]."""
    monkeypatch.setattr(FakeAnswer, "_text", lambda _self, choice, _limit: f"choice {choice} " + "and " * choice)
    real = FakeAnswer._choice

    def choices(self, choice):
        self._front_choice = choice
        for part in real(self, choice):
            self._front_choice = choice
            yield part

    monkeypatch.setattr(FakeAnswer, "_choice", choices)
    monkeypatch.setattr(
        FakeAnswer, "_row", lambda self, token_id, _top: TokenLogprobs(token_id, LOGPROBS[self._front_choice], 1, [])
    )
    front.script = Script()


def test_best_of_tells_the_most_probable(client, ranked):
    body = ask(client, COMPLETIONS, n=2, best_of=4, prompt=["a", "b"]).json()
    told = [(choice["index"], choice["text"][:8], choice["logprobs"]) for choice in body["choices"]]
    assert told == [(0, "choice 1", None), (1, "choice 2", None), (2, "choice 1", None), (3, "choice 2", None)]
    assert body["usage"]["completion_tokens"] > 4 * 4, "what was drawn is what is counted"
    one = ask(client, COMPLETIONS, best_of=3, logprobs=0).json()["choices"]
    assert len(one) == 1 and set(one[0]["logprobs"]["token_logprobs"]) == {-1.0}
    all_of_them = ask(client, COMPLETIONS, n=3, best_of=3).json()["choices"]
    assert [choice["text"][:8] for choice in all_of_them] == ["choice 0", "choice 1", "choice 2"]


def test_best_of_that_cannot_be(client, front):
    for fields in ({"n": 2, "best_of": 1}, {"best_of": 2, "stream": True}, {"best_of": 100}):
        got = ask(client, COMPLETIONS, **fields)
        assert (got.status_code, got.json()["error"]["param"]) == (400, "best_of")
    assert ask(client, CHAT, best_of=2).json()["error"]["param"] == "best_of"
    front.script = Script(finish_reason=FinishReason.STOP)
    assert ask(client, COMPLETIONS, n=2, best_of=2, stream=True).status_code == 200
