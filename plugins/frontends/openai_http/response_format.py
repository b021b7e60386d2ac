"""`response_format`, vLLM's `structured_outputs` and its older `guided_*` fields -> the grammar of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from core.errors import RequestError
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.structured_outputs import (
    MAX_GRAMMAR,
    Asked,
    StructuredOutputs,
    Wanted,
    asked_for,
    wanted_by,
)

if TYPE_CHECKING:
    from plugins.frontends.openai_http.schema import Structured

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_TYPES = ("text", "json_object", "json_schema", "structural_tag")


class _Format(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NamedSchema(_Format):
    """`strict` changes nothing: an answer follows the schema in any case, and the schema means what JSON Schema says."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Annotated[str, Field(max_length=MAX_GRAMMAR)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(_Format):
    type: Literal["text", "json_object"]


class SchemaFormat(_Format):
    type: Literal["json_schema"]
    json_schema: NamedSchema


_NAMED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "description": {"anyOf": [{"type": "string", "maxLength": MAX_GRAMMAR}, {"type": "null"}]},
        "schema": {"type": "object"},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "schema"],
}
_BY_TYPE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
    {
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "json_schema": _NAMED},
        "required": ["type", "json_schema"],
    },
    {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]},
]
ResponseFormat = Annotated[dict[str, Any], WithJsonSchema({"anyOf": _BY_TYPE})]


@dataclass(frozen=True, slots=True)
class AsksForGrammar:
    """The fields of `schema.Structured` where there is no such body."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None


def grammar_of(body: Structured | AsksForGrammar) -> Asked | None:
    """What the answer must be. Raises RequestError, also where two fields ask for something."""
    options = body.structured_outputs or StructuredOutputs()
    wanted = [*_by_format(body.response_format), *wanted_by(options)]
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            wanted.append(Wanted(kind, value, name))
    if body.guided_decoding_backend is not None and not wanted:
        message = "`guided_decoding_backend` needs a grammar: `guided_json`, `response_format` or another."
        raise RequestError(message, param="guided_decoding_backend")
    return asked_for(wanted, options, body.guided_decoding_backend)


def backend_param_of(body: Structured | AsksForGrammar) -> str:
    """The field that names the grammar's backend."""
    newer = body.structured_outputs is not None and body.structured_outputs.backend is not None
    older = body.guided_decoding_backend is not None and not newer
    return "guided_decoding_backend" if older else "structured_outputs.backend"


def _by_format(value: dict[str, Any] | None) -> list[Wanted]:
    if value is None:
        return []
    param = "response_format"
    match value.get("type"):
        case "text" | "json_object" as kind:
            validate(PlainFormat, value, prefix=param)
            return [] if kind == "text" else [Wanted("json_object", None, param)]
        case "json_schema":
            found = validate(SchemaFormat, value, prefix=param)
            return [Wanted("json_schema", found.json_schema.schema_, f"{param}.json_schema.schema")]
        case "structural_tag":
            return [Wanted("structural_tag", value, param)]
    types = ", ".join(f"`{name}`" for name in _TYPES)
    raise RequestError(f"`{param}.type` is one of {types}.", param=f"{param}.type")
