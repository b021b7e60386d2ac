"""`examples/templates/chatml_tools.jinja`: what it shows of tools is what `tool_parser=hermes` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.model.chat_template import ChatTemplate, TemplateLimits
from plugins.tool_parsers.hermes import HermesStream

SOURCE = Path(__file__).resolve().parents[2] / "examples/templates/chatml_tools.jinja"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
]


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate(SOURCE.read_text(encoding="utf-8"), {}, TemplateLimits())


def test_tools_are_shown_where_there_are_any(template: ChatTemplate) -> None:
    assert template.uses_tools
    shown = template.render(ASKED, add_generation_prompt=True, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in shown and shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    plain = template.render(ASKED, add_generation_prompt=True, tools=None)
    assert "<tools>" not in plain
    assert plain.endswith("<|im_start|>user\nWhat is the weather in Oslo?<|im_end|>\n<|im_start|>assistant\n")


def test_a_call_in_the_history_is_as_the_parser_finds_it(template: ChatTemplate) -> None:
    text = template.render(HISTORY, add_generation_prompt=True, tools=TOOLS)
    assert text.count("<|im_start|>system") == 1 and text.startswith("<|im_start|>system\nBe brief.")
    turn = text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
    stream = HermesStream(TOOLS)
    calls = [*stream.push(turn.partition("<|im_end|>")[0]).tool_calls, *stream.finish().tool_calls]
    assert calls[0].name == "get_weather"
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo"}
    assert "<tool_response>\n18 degrees\n</tool_response><|im_end|>" in text
