"""Each tool parser in a whole server: a required call is whole and valid, and streamed it is the same.

With a tiny model of random weights, which writes calls in a format because its grammar does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.testing.harness.served_pipelines import served_tiny
from core.testing.tiny_models import make_tiny_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Who is it?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["glad", 'it\'s "sad"']},
        "well": {"type": "boolean"},
        "days": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["mood", "well"],
    "additionalProperties": False,
}
TELL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.content }};{% endfor %}"
)
CASES = {
    "llama3_json": (),
    "mistral": (),
    "mistral named": ("tool_parser.form=named",),
    "pythonic": (),
    "qwen3_coder": (),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_tiny_model(tmp_path_factory.mktemp("formats") / "tiny")
    (model.parent / "short.jinja").write_text(TEMPLATE, encoding="utf-8")
    return model


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "now":
            assert arguments == {}
        else:
            assert arguments["mood"] in SCHEMA["properties"]["mood"]["enum"] and isinstance(arguments["well"], bool)
            assert set(arguments.get("days", ())) <= {1, 2}


@pytest.mark.parametrize("case", CASES)
def test_a_required_call_is_valid_in_every_format(model: Path, case: str) -> None:
    options = (f"tool_parser={case.split()[0]}", f"renderer.chat_template={model.parent / 'short.jinja'}", *CASES[case])
    with served_tiny(model, *options) as server:
        for seed in range(4):
            asked = {
                "messages": [USER],
                "tools": [TELL, NOW],
                "tool_choice": "required",
                "seed": seed,
                "max_tokens": 400,
            }
            choice = server.good(CHAT, **asked, parallel_tool_calls=False)["choices"][0]
            assert choice["message"]["content"] is None
            if choice["finish_reason"] == "tool_calls":
                check(choice["message"]["tool_calls"])
            else:  # a list that went on and on
                assert choice["finish_reason"] == "length"
        named = {"type": "function", "function": {"name": "now"}}
        choice = server.good(CHAT, **{**asked, "tool_choice": named})["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"], choice["finish_reason"]) == ({"name": "now", "arguments": "{}"}, "tool_calls")
        events = server.events(CHAT, **{**asked, "tool_choice": named})
        deltas = [delta for event in events for one in event["choices"] for delta in one["delta"].get("tool_calls", ())]
        assert deltas[0]["function"]["name"] == "now"
        assert "".join(delta["function"]["arguments"] for delta in deltas) == "{}"
