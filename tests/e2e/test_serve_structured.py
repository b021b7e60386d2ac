"""Structured output through a whole server. Rows G7, L1, L2, L5, L12 to L16, M1, M4.

With a tiny model of random weights, whose answers are noise but for the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Who is it?"}
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "Who is it?"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["froh", "müde", "🔥"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
        "well": {"type": "boolean"},
    },
    "required": ["mood", "years", "well"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}
CHECK = Draft202012Validator(SCHEMA)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"enum": [{"zone": "utc"}]}}}
TOOLS = [WEATHER, CLOCK]
SHORT_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_tiny_model(tmp_path_factory.mktemp("structured") / "tiny")
    template = model.parent / "short.jinja"
    template.write_text(SHORT_TEMPLATE, encoding="utf-8")
    with served_tiny(model, "tool_parser=hermes", f"renderer.chat_template={template}") as server:
        yield server


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in body["choices"]]


def whole(server: Served, path: str, **fields: Any) -> list[str]:
    """The texts of choices that ended by themselves."""
    body = server.good(path, **{**ASKED[path], "max_tokens": 300, "temperature": 0.9, "seed": 5, **fields})
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}, body
    return texts(body)


def is_state(text: str) -> bool:
    return bool(CHECK.is_valid(json.loads(text)))


# --- every kind -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_kind_holds_for_each_choice(tiny: Served, path: str) -> None:  # G7
    same: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
    ]
    told = [whole(tiny, path, n=3, **fields) for fields in same]
    assert all(is_state(text) for text in told[0]) and len(set(told[0])) > 1
    assert told[0] == told[1] == told[2], "three names of one thing"
    for text in whole(tiny, path, n=3, structured_outputs={"regex": "[a-f]{3}-(ja|né)"}):
        assert re.fullmatch("[a-f]{3}-(ja|né)", text)
    assert set(whole(tiny, path, n=4, guided_choice=["yes", "maybe so"])) <= {"yes", "maybe so"}
    grammar = 'root ::= item ("," item){2}\nitem ::= "a" [0-9]'
    for text in whole(tiny, path, n=2, guided_grammar=grammar):
        assert re.fullmatch("(a[0-9],){2}a[0-9]", text)


def test_a_json_object_is_one(tiny: Served) -> None:
    """A model of random weights need not come to an end: what it wrote is the beginning of an object."""
    body = tiny.good(CHAT, messages=[USER], max_tokens=40, temperature=0, response_format={"type": "json_object"})
    text = texts(body)[0]
    assert text.lstrip().startswith("{")
    if body["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_structural_tag_holds_what_is_in_it(tiny: Served) -> None:
    tag = {
        "type": "tag",
        "begin": "<state>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</state>",
    }
    for text in whole(tiny, CHAT, n=2, response_format={"type": "structural_tag", "format": tag}):
        assert text.startswith("<state>") and text.endswith("</state>")
        assert is_state(text.removeprefix("<state>").removesuffix("</state>"))


def test_white_space_is_bounded_or_none(tiny: Served) -> None:  # L1
    for seed in range(4):
        (text,) = whole(tiny, COMPLETIONS, seed=seed, structured_outputs={"json": SCHEMA})
        assert not re.search(r"\s{41}", text)
        (text,) = whole(
            tiny, COMPLETIONS, seed=seed, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}
        )
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


def test_l5_additional_properties_are_the_schemas_own_word(tiny: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    fields: dict[str, Any] = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
    assert [json.loads(text) for text in whole(tiny, COMPLETIONS, **fields)] == [{"a": 1}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_l2_whole_or_cut_and_never_anything_else(tiny: Served, path: str) -> None:
    for limit in (1, 2, 3, 5, 8, 13, 21, 34, 60):
        body = tiny.good(path, **ASKED[path], temperature=0.9, seed=limit, max_tokens=limit, response_format=FORMAT)
        reason, text = body["choices"][0]["finish_reason"], texts(body)[0]
        assert body["usage"]["completion_tokens"] <= limit
        if reason == "stop":
            assert is_state(text)
        else:
            assert reason == "length"
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_the_same(tiny: Served, path: str) -> None:
    fields: dict[str, Any] = {
        **ASKED[path],
        "max_tokens": 300,
        "temperature": 0.9,
        "seed": 5,
        "response_format": FORMAT,
    }
    (text,) = whole(tiny, path, response_format=FORMAT)
    events = tiny.events(path, **fields)
    choices = [choice for event in events for choice in event["choices"]]
    told = "".join(c["delta"].get("content") or "" if path == CHAT else c["text"] for c in choices)
    assert told == text and choices[-1]["finish_reason"] == "stop"


def test_best_of_with_a_grammar(tiny: Served) -> None:
    assert all(is_state(text) for text in whole(tiny, COMPLETIONS, n=2, best_of=4, response_format=FORMAT))


def test_every_token_has_its_logprob_forced_ones_too(tiny: Served) -> None:
    """E2 with tokens that no forward pass of their own has made."""
    body: dict[str, Any] = {**ASKED[CHAT], "max_tokens": 300, "temperature": 0.9, "seed": 5, "response_format": FORMAT}
    answer = tiny.good(CHAT, **body, logprobs=True, top_logprobs=2, return_token_ids=True)
    choice = answer["choices"][0]
    rows = choice["logprobs"]["content"]
    assert len(rows) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert all(isinstance(row["logprob"], float) and len(row["top_logprobs"]) == 2 for row in rows)
    ending = bytes(byte for row in rows for byte in row["bytes"]).decode()
    assert ending.startswith(choice["message"]["content"]) and is_state(choice["message"]["content"])
    plain = tiny.good(CHAT, **body, return_token_ids=True)["choices"][0]
    assert plain["token_ids"] == choice["token_ids"], "logprobs change nothing"


def test_other_masks_beside_a_grammar(tiny: Served) -> None:
    body: dict[str, Any] = {"guided_choice": ["yes", "no"], "n": 4}
    assert set(whole(tiny, COMPLETIONS, bad_words=["yes"], **body)) == {"no"}
    yes = tiny.good("/tokenize", prompt="yes", add_special_tokens=False)["tokens"]
    bias = {str(token_id): -100 for token_id in yes[:1]}
    assert set(whole(tiny, COMPLETIONS, logit_bias=bias, **body)) == {"no"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_no_backend_takes_is_told_by_its_path(tiny: Served, path: str) -> None:  # L12 to L16
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("structured_outputs.json", {"structured_outputs": {"json": {"type": "stsring"}}}),
        ("response_format.json_schema.schema", {"response_format": _format({"properties": {"a": {"type": "weird"}}})}),
        ("response_format.json_schema.schema", {"response_format": _format({"$ref": "#/$defs/gone"})}),
        ("guided_regex", {"guided_regex": "[.*"}),
        ("guided_regex", {"guided_regex": "(a"}),
        ("guided_grammar", {"guided_grammar": 'rout::="route"'}),
        ("guided_grammar", {"guided_grammar": "junk " * 100_000}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a" * 10_000}}),
        ("guided_json", {"guided_json": {"enum": ["x" * 50 + str(index) for index in range(10_000)]}}),
        ("guided_decoding_backend", {"guided_regex": "a", "guided_decoding_backend": "no_such_backend"}),
        ("structured_outputs.backend", {"structured_outputs": {"regex": "a", "backend": "no_such_backend"}}),
    ]
    for param, fields in wrong:
        error = tiny.refused(path, **ASKED[path], max_tokens=5, **fields)
        assert error["param"] == param and error["message"], fields
    assert is_state(whole(tiny, path, response_format=FORMAT)[0]), "and goes on"


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# --- tools ----------------------------------------------------------------------------------------


def calls(tiny: Served, **fields: Any) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Names and arguments, and the choice."""
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 300, "temperature": 0.9, "seed": 3, **fields}
    choice = tiny.good(CHAT, **body)["choices"][0]
    found = choice["message"].get("tool_calls", ())
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found], choice


def valid(name: str, arguments: dict[str, Any]) -> bool:
    tool = next(tool for tool in TOOLS if tool["function"]["name"] == name)
    return bool(Draft202012Validator(tool["function"]["parameters"]).is_valid(arguments))


def test_required_and_named_calls_are_valid(tiny: Served) -> None:
    names = set()
    for seed in range(6):
        found, choice = calls(tiny, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert len(found) == 1 and valid(*found[0])
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        names.add(found[0][0])
    assert names == {"weather", "clock"}
    for name in ("weather", "clock"):
        found, choice = calls(tiny, tool_choice={"type": "function", "function": {"name": name}})
        assert [call[0] for call in found] == [name] and valid(*found[0])
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    found, _ = calls(tiny, tool_choice={"type": "allowed_tools", "allowed_tools": only}, parallel_tool_calls=False)
    assert found == [("clock", {"zone": "utc"})]


def test_m1_a_stream_of_required_calls_says_the_same(tiny: Served) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    found, _ = calls(tiny, **fields)
    for interval in (1, 4):
        body = {"messages": [USER], "tools": TOOLS, "max_tokens": 300, "temperature": 0.9, "seed": 3, **fields}
        events = tiny.events(CHAT, **body, stream_interval=interval)
        deltas = [d for e in events for d in e["choices"][0]["delta"].get("tool_calls", ())]
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        assert [(deltas[0]["function"]["name"], json.loads(arguments))] == found
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_m4_a_call_that_is_cut_ends_by_length(tiny: Served) -> None:
    body = {"messages": [USER], "tools": TOOLS, "temperature": 0, "tool_choice": "required"}
    for limit in (1, 3, 9, 15):
        choice = tiny.good(CHAT, **body, max_tokens=limit)["choices"][0]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", ()):
            with pytest.raises(json.JSONDecodeError):
                json.loads(call["function"]["arguments"])


def test_a_response_format_beside_tools_is_a_call_or_an_answer(tiny: Served) -> None:
    """A bias decides which: the first token is `<` or `{`."""
    for first in ("<", "{"):
        ids = tiny.good("/tokenize", prompt=first, add_special_tokens=False)["tokens"]
        found, choice = calls(tiny, response_format=FORMAT, logit_bias={str(ids[0]): 100})
        if first == "<":
            assert len(found) == 1 and valid(*found[0]) and choice["finish_reason"] == "tool_calls"
        else:
            assert is_state(choice["message"]["content"]) and choice["finish_reason"] == "stop"


def test_without_a_backend_a_grammar_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    with served_tiny(model, "grammars=[]") as server:
        error = server.refused(COMPLETIONS, prompt="x", guided_regex="a")
        assert error["param"] == "guided_regex" and "llguidance" in error["message"]
        assert server.good(COMPLETIONS, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2
