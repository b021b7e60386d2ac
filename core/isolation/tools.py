"""The tool parser as frontends see it: what it does wrong fails one answer, and switches it off when it happens often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from core.errors import GenerationError, RequestError
from core.isolation.front import Guard, MalformedError, is_encodable, kind_of
from core.stages.tool_parser import ParsedText, ToolCallDelta, ToolParser, ToolStream

MAX_CALLS = 1024  # of one choice
_NOTHING = ParsedText()


class GuardedToolParser:
    """`core.stages.tool_parser.ToolParser`. Streams raise GenerationError that names the component."""

    def __init__(self, parser: ToolParser, guard: Guard):
        self._parser = parser
        self._guard = guard

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        """Raises RequestError: 503 once it is switched off, or what the parser itself says of the tools."""
        incident = self._guard.incident
        if incident is not None and incident.quarantined:
            raise RequestError(
                f"tool_parser={incident.name} was switched off after {incident.failures} failures; "
                "requests with tools are refused until the next start",
                param="tools",
                code="plugin_quarantined",
                status=503,
            )
        return GuardedStream(self._guard.call(self._opened, tools), self._guard)

    def _opened(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        stream = self._parser.stream(deepcopy(list(tools)))
        if not (callable(getattr(stream, "push", None)) and callable(getattr(stream, "finish", None))):
            raise MalformedError(f"stream returned {kind_of(stream)}, which is no ToolStream")
        return stream


class GuardedStream:
    """`core.stages.tool_parser.ToolStream`, checked. After an error every call raises it again."""

    def __init__(self, stream: ToolStream, guard: Guard):
        self._stream = stream
        self._guard = guard
        self._num_calls = 0
        self._error: GenerationError | None = None

    def push(self, text: str) -> ParsedText:
        return self._checked(self._stream.push, text) if text else _NOTHING

    def finish(self) -> ParsedText:
        return self._checked(self._stream.finish)

    def _checked(self, fn: Callable[..., ParsedText], *args: str) -> ParsedText:
        if self._error is not None:
            raise self._error
        try:
            return self._guard.call(lambda: self._check(fn(*args)))
        except GenerationError as error:
            self._error = error
            raise

    def _check(self, parsed: object) -> ParsedText:
        if type(parsed) is not ParsedText or type(parsed.content) is not str or not is_encodable(parsed.content):
            raise MalformedError("it returned what is no ParsedText with a text as content")
        if not isinstance(parsed.tool_calls, tuple | list):
            raise MalformedError("it returned tool calls that are no tuple")
        return ParsedText(parsed.content, tuple(map(self._check_call, parsed.tool_calls)))

    def _check_call(self, call: object) -> ToolCallDelta:
        if type(call) is not ToolCallDelta or type(call.index) is not int:
            raise MalformedError("it returned a tool call that is no ToolCallDelta with an index")
        if type(call.arguments) is not str or not is_encodable(call.arguments):
            raise MalformedError("it returned arguments that are no text")
        if call.index == self._num_calls < MAX_CALLS:
            if not _is_word(call.name) or not (call.call_id is None or _is_word(call.call_id)):
                raise MalformedError("it returned a tool call that begins without a name")
            self._num_calls += 1
        elif not 0 <= call.index < self._num_calls:
            raise MalformedError(f"it returned tool call {call.index} after {self._num_calls}")
        elif call.name is not None or call.call_id is not None:
            raise MalformedError("it returned the name of a tool call twice")
        return call


def _is_word(value: object) -> bool:
    return type(value) is str and value != "" and is_encodable(value)
