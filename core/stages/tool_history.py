"""The messages of a chat as its template expects them: contents, and the tool calls of its history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from core.errors import RequestError, printable
from core.model.content_form import ContentForm


def template_messages(
    messages: Sequence[Mapping[str, Any]], form: ContentForm = ContentForm.TEXT
) -> list[Mapping[str, Any]]:
    """Messages of OpenAI's shape for a template: contents in its form, and the arguments of tool calls as objects in place of
    their JSON text.

    So does Hugging Face's `apply_chat_template` expect these, and templates write them with `tojson`. A content of null
    beside tool calls becomes an empty text, which templates can join. A list of text parts is joined by newlines where the
    template takes texts, as in vLLM. Raises RequestError for other parts there, and for arguments that are no JSON object.
    """
    return [_message(message, f"messages[{index}]", form) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str, form: ContentForm) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, list | tuple) and form is ContentForm.TEXT:
        message = {**message, "content": _text_of(content, f"{param}.content")}
    elif isinstance(content, str) and form is ContentForm.PARTS:
        message = {**message, "content": [{"type": "text", "text": content}]}
    return _with_arguments(message, param)


def _text_of(parts: Sequence[Any], param: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = printable(str(part.get("type"))) if isinstance(part, Mapping) else type(part).__name__
            message = f"{param}[{index}]: the chat template takes texts, and parts of type `text`; this one is `{kind}`"
            raise RequestError(message, param=f"{param}[{index}].type", code="unsupported")
        texts.append(text)
    return "\n".join(texts)


def _with_arguments(message: Mapping[str, Any], param: str) -> Mapping[str, Any]:
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
