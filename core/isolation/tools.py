"""The tool parser as frontends see it: what it does wrong fails one answer, and switches it off when it happens often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from core.errors import RequestError
from core.isolation.front import Guard, MalformedError, is_encodable, kind_of
from core.isolation.streams import CheckedStream, opened
from core.request import GRAMMAR_KINDS, GrammarSpec
from core.stages.tool_parser import ParsedText, ToolCallDelta, ToolParser, ToolStream

MAX_CALLS = 1024  # of one choice
MAX_MARKERS = 64  # special tokens of one parser
_NOTHING = ParsedText()


class GuardedToolParser:
    """`core.stages.tool_parser.ToolParser`. Streams raise GenerationError that names the component."""

    def __init__(self, parser: ToolParser, guard: Guard):
        self._parser = parser
        self._guard = guard

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        """Raises RequestError: 503 once it is switched off, or what the parser itself says of the tools."""
        return self.streams(tools, 1)[0]

    def streams(self, tools: Sequence[Mapping[str, Any]], num: int) -> list[ToolStream]:
        """Raises what `stream` raises."""
        self._check_running()
        private = deepcopy(list(tools))  # of this request: what the parser does to it harms nobody else
        return [self._stream(private) for _ in range(num)]

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        """None, too, of a parser that knows no grammars. Raises what `stream` raises."""
        self._check_running()
        return self._guard.call(self._made_grammar, tools, choice, parallel)

    @property
    def special_tokens(self) -> Sequence[str]:
        return () if self._guard.is_off else self._guard.call(markers_of, self._parser)

    def _check_running(self) -> None:
        incident = self._guard.incident
        if incident is not None and incident.quarantined:
            raise RequestError(
                f"tool_parser={incident.name} was switched off after {incident.failures} failures; "
                "requests with tools are refused until the next start",
                param="tools",
                code="plugin_quarantined",
                status=503,
            )

    def _made_grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        make = getattr(self._parser, "grammar", None)
        spec = None if make is None else make(deepcopy(list(tools)), choice, parallel)
        if spec is None:
            return None
        if type(spec) is not GrammarSpec or spec.kind not in GRAMMAR_KINDS:
            raise MalformedError(f"grammar returned {kind_of(spec)}, which is no GrammarSpec of a known kind")
        texts = (spec.source, spec.backend, spec.after, spec.opening)
        if not all(type(text) is str and is_encodable(text) for text in texts):
            raise MalformedError("grammar returned a GrammarSpec with what is no text")
        if type(spec.any_whitespace) is not bool or type(spec.may_end) is not bool:
            raise MalformedError("grammar returned a GrammarSpec with what is neither true nor false")
        if type(spec.artifact) is not bytes or spec.artifact:
            raise MalformedError("grammar returned a GrammarSpec with an artifact, which backends alone make")
        return spec

    def _stream(self, private: list[Mapping[str, Any]]) -> ToolStream:
        stream = self._guard.call(lambda: opened(self._parser.stream(private), "ToolStream"))
        return CheckedStream(stream, self._guard, _Calls().check, _NOTHING)


class _Calls:
    """What a stream has said of calls so far: the next pieces must go on from there."""

    def __init__(self) -> None:
        self._num_calls = 0

    def check(self, parsed: object) -> ParsedText:
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


def markers_of(parser: object) -> tuple[str, ...]:
    """Its `special_tokens`, checked. Raises MalformedError."""
    found = getattr(parser, "special_tokens", ())
    if not isinstance(found, tuple | list) or len(found) > MAX_MARKERS or not all(map(_is_word, found)):
        raise MalformedError(f"its special_tokens are no tuple of up to {MAX_MARKERS} texts")
    return tuple(found)


def _is_word(value: object) -> bool:
    return type(value) is str and value != "" and is_encodable(value)
