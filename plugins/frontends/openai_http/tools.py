"""Tools: what a request says of them, and the calls in an answer, in OpenAI's shapes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from core.errors import RequestError, printable
from core.grammar.schema.foreign_types import with_json_types
from core.grammar.schema.wellformed import check_form
from core.request import GrammarSpec
from core.stages.frontend import FrontToolParser
from core.stages.grammar import GrammarError
from core.stages.tool_parser import AUTO, REQUIRED, ToolCallDelta, ToolParser, ToolStream
from plugins.frontends.openai_http.schema import ChatBody, Templated
from plugins.frontends.openai_http.tool_choice import tool_choice
from plugins.frontends.structured_outputs import Asked, closed_schema, compact


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of its tools, checked."""

    tools: list[dict[str, Any]]  # OpenAI's shape, `strict` included; all that the model is told of
    callable: list[dict[str, Any]]  # those of them that it may call
    must_call: bool = False
    parallel: bool = True
    held_by: str = ""  # the field that only a grammar can honour; "": none does
    grammar_param: str = "tools"  # where that grammar comes from

    @property
    def shown(self) -> list[dict[str, Any]]:
        """As chat templates get them."""
        return [_without_strict(tool) for tool in self.tools]


@dataclass(frozen=True, slots=True)
class GrammarParsers:
    """Names of tool parsers that know grammars, for messages."""

    selected: str = ""  # "": the selected one knows none
    others: Sequence[str] = ()


def tool_use(body: Templated) -> ToolUse:
    """Raises RequestError, also for parameters that are no JSON schema, which no model could be shown in earnest.

    With `tool_choice: none` there are no tools: the model does not see them, and its text is content.
    """
    tools = body.tools or []
    names: dict[str, str] = {}
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        if tool.function.name in names:
            raise RequestError(f"Two tools have the name `{tool.function.name}`.", param=f"{param}.name")
        names[tool.function.name] = param
        _check_parameters(tool.function.parameters, f"{param}.parameters")
    known = [tool.model_dump(exclude_none=True) for tool in tools]
    if not isinstance(body, ChatBody):
        return ToolUse(known, known)
    choice = tool_choice(body.tool_choice, list(names))
    if choice.hides_tools or not tools:
        return ToolUse([], [])
    parallel = body.parallel_tool_calls is not False and choice.many
    named = set(names if choice.names is None else choice.names)
    strict = [names[tool.function.name] for tool in tools if tool.function.strict and tool.function.name in named]
    held_by = choice.held_by or (f"{strict[0]}.strict" if strict else "" if parallel else "parallel_tool_calls")
    callable_ = [tool for tool in known if tool["function"]["name"] in named]
    param = f"{names[callable_[0]['function']['name']]}.parameters" if len(callable_) == 1 else "tools"
    return ToolUse(known, callable_, choice.must_call, parallel, held_by, param)


def tools_of(body: Templated) -> list[dict[str, Any]]:
    """The tools that the model is told of, and whose calls are looked for. Raises RequestError."""
    return tool_use(body).shown


def _check_parameters(parameters: Mapping[str, Any] | None, param: str) -> None:
    """Not what a grammar can hold calls to: a model may be shown more than that."""
    if not parameters:
        return
    schema = with_json_types(parameters)
    try:
        check_form(schema)
    except GrammarError as error:
        raise RequestError(f"`{param}`: {error}", param=param, code="invalid_schema") from None
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        message = f"`{param}`: a call's arguments are an object, and `type` is {printable(str(kinds))!r}."
        raise RequestError(message, param=param, code="invalid_schema")


def grammar_of_calls(use: ToolUse, parser: ToolParser, known: GrammarParsers) -> Asked | None:
    """What holds the calls to their schemas; None where nothing asks for that. Raises RequestError."""
    if not use.held_by:
        return None
    choice = REQUIRED if use.must_call else AUTO
    spec = parser.grammar(_with_json_types(use.callable), choice, use.parallel)
    return Asked(_known(spec, use.held_by, known), use.grammar_param)


def grammar_beside_calls(
    use: ToolUse, parser: ToolParser, asked: Asked | None, known: GrammarParsers = GrammarParsers()
) -> Asked | None:
    """The answer's grammar: of calls, of text, or of both, where the model may do either: one call, or one text.

    Raises RequestError for what cannot be had together.
    """
    if asked is None or not use.tools:
        return grammar_of_calls(use, parser, known) if asked is None else asked
    if use.must_call:
        message = f"`{asked.param}` and a `tool_choice` that makes the model call a tool exclude each other."
        raise RequestError(message, param=asked.param)
    spec = asked.spec
    if spec.kind not in ("json_schema", "json_object"):
        message = f"`{asked.param}` and `tools` go together for JSON alone; for this grammar send `tool_choice: none`."
        raise RequestError(message, param=asked.param)
    callable_ = _with_json_types(use.callable, closed=asked.closed)
    call = _known(parser.grammar(callable_, REQUIRED, False), asked.param, known)
    if call.kind != "structural_tag" or call.after:
        message = f"`{asked.param}` and `tools` do not go together in the format of this server's tool parser."
        raise RequestError(message, param=asked.param, code="unsupported")
    tag = json.loads(call.source)
    schema = json.loads(spec.source) if spec.kind == "json_schema" else {"type": "object"}
    tag["structures"].append({"begin": "", "schema": schema, "end": ""})
    both = msgspec.structs.replace(spec, kind=call.kind, source=compact(tag))
    return Asked(both, asked.param)


def _known(spec: GrammarSpec | None, param: str, known: GrammarParsers) -> GrammarSpec:
    """`param`: the field that needs it."""
    if spec is not None:
        return spec
    hint = " or ".join(f"tool_parser={name}" for name in known.others)
    if known.selected:
        message = (
            f"`{param}`: tool_parser={known.selected} has no grammar for calls of these tools, whose parameters say more than "
            f"its format's grammar can hold them to; simplify them{f', or serve with {hint}' if hint else ''}."
        )
    else:
        message = f"`{param}` needs a tool parser that can say in a grammar how calls of these tools are written"
        message += f"; serve with {hint}." if hint else "."
    raise RequestError(message, param=param, code="unsupported")


def _with_json_types(tools: Sequence[Mapping[str, Any]], *, closed: bool = False) -> list[dict[str, Any]]:
    """Lists of tools are full of types that JSON Schema does not have: `dict`, `float`."""
    return [{**tool, "function": _with_json_parameters(tool["function"], closed)} for tool in tools]


def _with_json_parameters(function: Mapping[str, Any], closed: bool) -> dict[str, Any]:
    if "parameters" not in function:
        return dict(function)
    parameters = with_json_types(function["parameters"])
    return {**function, "parameters": closed_schema(parameters) if closed else parameters}


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """For chat templates, which would show it to the model."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


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


def calls_of(parser: FrontToolParser, tools: Sequence[Mapping[str, Any]], n: int) -> list[CallsOfChoice]:
    """One per choice; none without tools. Raises RequestError where the parser does not serve these tools."""
    return [CallsOfChoice(stream) for stream in parser.streams(tools, n)] if tools else []


def _joined(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append(delta)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
