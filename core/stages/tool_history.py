"""Tool calls in a chat's history, as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from core.errors import RequestError


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of OpenAI's shape for a template: the arguments of tool calls are objects in place of their JSON text.

    So does Hugging Face's `apply_chat_template` expect them, and templates write them with `tojson`. A content of null
    beside tool calls becomes an empty text, which templates can join. Raises RequestError for arguments that are no JSON
    object.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = [_call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(calls)]
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": parsed}


def _call(call: Any, param: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {
        **call,
        "function": {**function, "arguments": _parsed(function["arguments"], f"{param}.function.arguments")},
    }


def _parsed(text: str, param: str) -> Any:
    """Without arguments a model may write nothing at all."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{param}: arguments are a JSON object", param=param)
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
