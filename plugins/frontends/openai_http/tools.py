"""Tools: what a request says of them, and the calls in an answer, in OpenAI's shapes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.errors import RequestError
from core.stages.tool_parser import ToolCallDelta, ToolParser, ToolStream
from plugins.frontends.openai_http.schema import ChatBody, Templated, Tool

_GRAMMAR = "needs a sampler with grammar support, which a later release brings"


def tools_of(body: Templated) -> list[dict[str, Any]]:
    """The tools that the model is told of, and whose calls are looked for. Raises RequestError.

    With `tool_choice: none` there are none of them: the model does not see them, and its text is content.
    """
    tools = body.tools or []
    choice = body.tool_choice if isinstance(body, ChatBody) else None
    _check_choice(choice, bool(tools))
    if tools and isinstance(body, ChatBody) and body.parallel_tool_calls is False:
        raise _unsupported(f"`parallel_tool_calls: false` {_GRAMMAR}.", "parallel_tool_calls")
    known: set[str] = set()
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}].function", known)
    left_out = {"function": {"strict"}}
    return [] if choice == "none" else [tool.model_dump(exclude_none=True, exclude=left_out) for tool in tools]


def _check_choice(choice: Any, has_tools: bool) -> None:
    if choice == "required" or isinstance(choice, dict):
        raise _unsupported(
            f"A `tool_choice` that makes the model call a tool {_GRAMMAR}; `auto` lets it.", "tool_choice"
        )
    if choice not in (None, "none", "auto"):
        raise RequestError("`tool_choice` is `auto`, `none`, `required` or a function.", param="tool_choice")
    if choice == "auto" and not has_tools:
        raise RequestError("`tool_choice` needs `tools`.", param="tool_choice")


def _check_tool(tool: Tool, param: str, known: set[str]) -> None:
    if tool.function.strict:
        raise _unsupported(f"`strict: true` {_GRAMMAR}.", f"{param}.strict")
    if tool.function.name in known:
        raise RequestError(f"Two tools have the name `{tool.function.name}`.", param=f"{param}.name")
    known.add(tool.function.name)


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported")


@dataclass(frozen=True, slots=True)
class Said:
    """New content and calls of a choice; calls as in a chunk's delta."""

    content: str
    tool_calls: list[dict[str, Any]]


@dataclass(slots=True)
class CallsOfChoice:
    """One choice's text on its way through the tool parser. Raises GenerationError where that fails."""

    stream: ToolStream
    _arguments: list[list[str]] = field(default_factory=list)  # of each call, in pieces

    def take(self, text: str, *, ended: bool) -> Said:
        """The next text; `ended`: there is no more."""
        told = [self.stream.push(text)]
        if ended:
            told.append(self.stream.finish())
        calls = [self._delta(call) for parsed in told for call in parsed.tool_calls]
        return Said("".join(parsed.content for parsed in told), calls)

    def whole(self, text: str) -> dict[str, Any]:
        """Content and calls of a message. The same as the deltas of `take` add up to."""
        said = self.take(text, ended=True)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in _joined(said.tool_calls)]
        return {"content": said.content or None, "tool_calls": calls} if calls else {"content": said.content}

    def finish_reason(self, reason: str | None) -> str | None:
        """`tool_calls` in place of `stop`, where every call has arguments that can be read: a client may run them."""
        return "tool_calls" if reason == "stop" and self._arguments and self._are_whole() else reason

    def _are_whole(self) -> bool:
        try:
            return all(isinstance(json.loads("".join(pieces)), dict) for pieces in self._arguments)
        except (ValueError, RecursionError):
            return False

    def _delta(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            self._arguments[call.index].append(call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._arguments.append([call.arguments])
        return {
            "index": call.index,
            "id": call.call_id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def calls_of(parser: ToolParser, tools: Sequence[Mapping[str, Any]], n: int) -> list[CallsOfChoice]:
    """One per choice; none without tools. Raises RequestError where the parser does not serve these tools."""
    return [CallsOfChoice(parser.stream(tools)) for _ in range(n)] if tools else []


def _joined(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append(delta)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
