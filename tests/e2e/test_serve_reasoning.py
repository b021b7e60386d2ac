"""Reasoning through a whole server: it is free, and what follows it is held to the grammar.

With a tiny model of random weights, whose reasoning is noise that ends with the first `e`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Who is it?"}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "well": {"type": "boolean"}},
    "required": ["mood", "well"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>e{% endif %}"
)
ENDS_SOON = ("reasoning_parser.opened=true", "reasoning_parser.end=e")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    model = make_tiny_model(tmp_path_factory.mktemp("reasoning") / "tiny")
    template = model.parent / "short.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    return model, ("tool_parser=hermes", "reasoning_parser=think", f"renderer.chat_template={template}")


@pytest.fixture(scope="module")
def server(overrides: tuple[Path, tuple[str, ...]]) -> Iterator[Served]:
    model, options = overrides
    with served_tiny(model, *options, *ENDS_SOON) as server:
        yield server


def asked(seed: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 400, "temperature": 1, "seed": seed, **fields}


def test_an_answer_is_free_first_and_held_to_the_grammar_then(server: Served) -> None:
    thoughts = set()
    for seed in range(8):
        body = server.good(CHAT, **asked(seed, response_format=FORMAT, return_token_ids=True))
        choice = body["choices"][0]
        assert choice["finish_reason"] == "stop"
        told = json.loads(choice["message"]["content"])
        assert told.keys() == {"mood", "well"} and told["mood"] in ("glad", "sad")
        thoughts.add(choice["message"].get("reasoning_content"))
        assert "e" not in (choice["message"].get("reasoning_content") or "")
        assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert len(thoughts) > 4, "the reasoning is not held to anything"


def test_a_stream_says_the_same(server: Served) -> None:
    whole = server.good(CHAT, **asked(3, response_format=FORMAT))["choices"][0]["message"]
    events = server.events(CHAT, **asked(3, response_format=FORMAT))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole.get("reasoning_content", "")


def test_a_required_call_comes_behind_the_reasoning(server: Served) -> None:
    for seed in range(4):
        fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        choice = server.good(CHAT, **asked(seed, **fields))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "tell" and json.loads(call["function"]["arguments"])["mood"] in (
            "glad",
            "sad",
        )
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_reasoning_that_does_not_end_is_cut_by_length(overrides: tuple[Path, tuple[str, ...]], server: Served) -> None:
    """Nor can the output end within it: what the request allows are a few letters, and an end that is none here."""
    config = json.loads((overrides[0] / "config.json").read_text())
    ends = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    letters = server.good("/tokenize", prompt="a b c", add_special_tokens=False)["tokens"]
    fields = {"response_format": FORMAT, "max_tokens": 30, "allowed_token_ids": [*letters, *ends]}
    choice = server.good(CHAT, **asked(0, **fields))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert set(choice["message"]["reasoning_content"]) <= set("a b c")


def test_a_prompt_that_has_ended_it_begins_with_the_grammar(server: Served) -> None:
    fields = {"response_format": FORMAT, "chat_template_kwargs": {"enable_thinking": False}}
    for seed in range(3):
        message = server.good(CHAT, **asked(seed, **fields))["choices"][0]["message"]
        assert "reasoning_content" not in message and json.loads(message["content"]).keys() == {"mood", "well"}


def test_forced_tokens_make_no_difference(overrides: tuple[Path, tuple[str, ...]], server: Served) -> None:
    model, options = overrides
    with served_tiny(model, *options, *ENDS_SOON, "structured_outputs.jump_forward=false") as slow:
        for fields in ({"response_format": FORMAT}, {"tools": [TOOL], "tool_choice": "required"}):
            wanted = asked(5, return_token_ids=True, temperature=0, **fields)
            fast, slowly = (one.good(CHAT, **wanted)["choices"][0]["token_ids"] for one in (server, slow))
            assert fast == slowly


def test_an_output_need_not_reason(overrides: tuple[Path, tuple[str, ...]]) -> None:
    """The model may open its reasoning, or answer at once: an answer is in the grammar in both cases."""
    model, options = overrides
    with served_tiny(model, *options, "reasoning_parser.begin=b", "reasoning_parser.end=e") as server:
        for seed in range(6):
            choice = server.good(CHAT, **asked(seed, response_format=FORMAT))["choices"][0]
            assert json.loads(choice["message"]["content"]).keys() == {"mood", "well"}
