"""Tools through a whole pipeline: the chat template shows them, the history holds calls, the parser reads the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.model.describe import read_spec
from core.model.sources import resolve
from core.model.tokenizer import load_tokenizer
from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "the weather"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.arguments | tojson }}>{% endfor %};{% endfor %}"
)
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tools") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    template = model.parent / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    with served_tiny(model, "tool_parser=hermes", f"renderer.chat_template={template}") as server:
        yield server


def test_tools_and_calls_are_in_the_prompt(server: Served, model: Path) -> None:
    tokenizer = load_tokenizer(read_spec(resolve(str(model), cache_dir=model.parent, progress=print)).files)
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    answer = server.good(CHAT, messages=history, tools=[TOOL], **GREEDY)
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == '[weather]user: the weather;assistant: <{"city": "Oslo"}>;tool: 5;'
    assert server.good("/tokenize", messages=history, tools=[TOOL])["tokens"] == answer["prompt_token_ids"]
    hidden = server.good(CHAT, messages=history, tools=[TOOL], tool_choice="none", **GREEDY)
    assert len(hidden["prompt_token_ids"]) < len(answer["prompt_token_ids"])


def test_text_without_calls_is_the_same_with_tools_and_without(server: Served) -> None:
    """The tiny model writes no calls: all of its text is content, whole and streamed."""
    answer = server.good(CHAT, messages=[USER], tools=[TOOL], **GREEDY)
    prompt = {"prompt": answer["prompt_token_ids"], **GREEDY}
    plain = server.good("/v1/completions", **prompt)["choices"][0]
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["token_ids"]) == (plain["text"], plain["token_ids"])
    assert choice["finish_reason"] == plain["finish_reason"]
    events = server.events(CHAT, messages=[USER], tools=[TOOL], **GREEDY)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == plain["text"]


def test_what_is_missing_is_named(model: Path) -> None:
    with served_tiny(model, "tool_parser=hermes") as server:
        error = server.refused(CHAT, messages=[USER], tools=[TOOL])
        assert error["param"] == "tools" and "renderer.chat_template" in error["message"]
    with served_tiny(model) as server:
        for stream in (True, False):
            error = server.refused(CHAT, messages=[USER], tools=[TOOL], stream=stream)
            assert error["param"] == "tools" and "tool_parser=hermes" in error["message"]
