"""`tool_choice` in its forms: a word, a function, or OpenAI's `allowed_tools`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from core.errors import RequestError, near_matches
from plugins.frontends.openai_http.parse import validate

PARAM = "tool_choice"
MAX_ALLOWED = 4096


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(_Form):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class FunctionChoice(_Form):
    type: Literal["function"]
    function: Named


class AllowedTools(_Form):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_ALLOWED)]


class AllowedChoice(_Form):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_NAMED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 256}}, "required": ["name"]}
_FUNCTION = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _NAMED},
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _FUNCTION, "minItems": 1, "maxItems": MAX_ALLOWED},
    },
    "required": ["mode", "tools"],
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _FUNCTION,
        {
            "type": "object",
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED},
            "required": ["type", "allowed_tools"],
        },
        {"type": "null"},
    ]
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    must_call: bool = False
    names: tuple[str, ...] | None = None  # of the functions that may be called; None: all
    many: bool = True  # several calls may come where the request does not say otherwise
    hides_tools: bool = False

    @property
    def held_by(self) -> str:
        """The field that only a grammar can honour."""
        return PARAM if self.must_call or self.names is not None else ""


def tool_choice(value: Any, names: Sequence[str]) -> ToolChoice:
    """`names`: of the request's tools. Raises RequestError."""
    if value is None or value == "none":
        return ToolChoice(hides_tools=value == "none")
    choice = _parsed(value)
    if not names:
        raise RequestError("`tool_choice` needs `tools`.", param=PARAM)
    for index, name in enumerate(choice.names or ()):
        if name not in names:
            path = f"allowed_tools.tools[{index}]." if choice.many else ""
            param = f"{PARAM}.{path}function.name"
            raise RequestError(f"`{param}` is no function of `tools`{near_matches(name, names)}", param=param)
    return choice


def _parsed(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in ("auto", "required"):
        return ToolChoice(must_call=value == "required")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        named = validate(FunctionChoice, value, prefix=PARAM)
        return ToolChoice(must_call=True, names=(named.function.name,), many=False)
    if kind == "allowed_tools":
        allowed = validate(AllowedChoice, value, prefix=PARAM).allowed_tools
        names = tuple(tool.function.name for tool in allowed.tools)
        return ToolChoice(must_call=allowed.mode == "required", names=names)
    raise RequestError("`tool_choice` is `auto`, `none`, `required`, a function or `allowed_tools`.", param=PARAM)
