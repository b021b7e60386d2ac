"""What an answer must be, in a client's words: vLLM's `structured_outputs` and its kin, as one `GrammarSpec`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from core.errors import RequestError
from core.grammar.schema.places import with_below
from core.request import JSON_KINDS, GrammarSpec
from plugins.frontends.openai_http import strict_json
from plugins.frontends.structural_tags import TAG_FORM, tag_of

MAX_GRAMMAR = 1 << 20  # characters; the server's own limit is structured_outputs.max_bytes
MAX_OPTIONS = 1 << 16
SCHEMA_DEPTH = 200  # of a schema that comes as a text; the server's own limit is structured_outputs.max_depth
_WITH_SCHEMAS = ("json_schema", "structural_tag")
_CONDITIONS = frozenset(("if", "not"))

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
SCHEMA_FORM: dict[str, Any] = {
    "anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR}, {"type": "null"}]
}
JsonSchema = Annotated[Any, WithJsonSchema(SCHEMA_FORM)]
Options = Annotated[list[GrammarText], Field(min_length=1, max_length=MAX_OPTIONS)]
Backend = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]


class StructuredOutputs(BaseModel):
    """One of the first six, and how it is to be read. Names are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    json_schema: JsonSchema = Field(default=None, alias="json")  # an object, or its text
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Options | None = None
    grammar: GrammarText | None = None  # EBNF, as llama.cpp and xgrammar write it
    structural_tag: Annotated[Any, WithJsonSchema(TAG_FORM)] = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    backend: Backend | None = None  # an option of config group `grammars`; "auto": the first that takes the grammar
    whitespace_pattern: Annotated[Any, WithJsonSchema({"type": "null"})] = None  # refused by name


KIND_OF_FIELD = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar as it was sent. `value`: a schema (object or text), a text, a list of texts; None for json_object."""

    kind: str  # of core.request.GRAMMAR_KINDS
    value: Any
    param: str  # the client's field


@dataclass(frozen=True, slots=True)
class Asked:
    """The grammar of a request, and the client's field that it came from."""

    spec: GrammarSpec
    param: str
    closed: bool = False  # objects have no additional properties


def wanted_by(outputs: StructuredOutputs, prefix: str = "structured_outputs") -> list[Wanted]:
    """What the six fields hold; for a correct request one of them, or none."""
    given = outputs.model_dump(by_alias=True, exclude_none=True)
    if not given.get("json_object"):
        given.pop("json_object", None)
    return [Wanted(kind, given[name], f"{prefix}.{name}") for name, kind in KIND_OF_FIELD.items() if name in given]


def asked_for(wanted: Sequence[Wanted], options: StructuredOutputs, backend: str | None = None) -> Asked | None:
    """The one grammar among `wanted`, read as `options` say. Raises RequestError that names the field, or the two fields."""
    if options.whitespace_pattern is not None:
        param = "structured_outputs.whitespace_pattern"
        message = (
            f"`{param}` is not supported: white space is bounded by the server, or none with `disable_any_whitespace`."
        )
        raise RequestError(message, param=param, code="unsupported")
    if len(wanted) > 1:
        first, second = wanted[0].param, wanted[1].param
        raise RequestError(f"`{first}` and `{second}` exclude each other: an answer has one grammar.", param=second)
    backend = _backend(options, backend)
    if not wanted:
        _check_nothing_is_left(options)
        return None
    one = wanted[0]
    closed, any_whitespace = bool(options.disable_additional_properties), not options.disable_any_whitespace
    _check_is_about("disable_any_whitespace", not any_whitespace, one, JSON_KINDS)
    _check_is_about("disable_additional_properties", closed, one, _WITH_SCHEMAS)
    spec = GrammarSpec(kind=one.kind, source=_source(one, closed), any_whitespace=any_whitespace, backend=backend)
    return Asked(spec, one.param, closed)


def _check_is_about(name: str, is_set: bool, wanted: Wanted, kinds: Sequence[str]) -> None:
    """Raises RequestError where the option would be without effect."""
    if is_set and wanted.kind not in kinds:
        fields = " or ".join(f"`{field}`" for field, kind in KIND_OF_FIELD.items() if kind in kinds)
        message = f"`structured_outputs.{name}` is about {fields}, and does nothing for `{wanted.param}`; leave it out."
        raise RequestError(message, param=f"structured_outputs.{name}")


def _backend(options: StructuredOutputs, older: str | None) -> str:
    """The option's name; "" where any may compile it."""
    newer = options.backend
    if newer is not None and older is not None and newer != older:
        message = "`guided_decoding_backend` and `structured_outputs.backend` contradict each other; send one."
        raise RequestError(message, param="guided_decoding_backend")
    named = newer or older or "auto"
    if options.disable_fallback and named == "auto":
        message = "`structured_outputs.disable_fallback` needs a `backend`, which then is the only one that is asked."
        raise RequestError(message, param="structured_outputs.disable_fallback")
    return "" if named == "auto" else named


def _check_nothing_is_left(options: StructuredOutputs) -> None:
    """Options of a grammar that is not there would be ignored."""
    for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "backend"):
        if getattr(options, name):
            fields = ", ".join(f"`{field}`" for field in KIND_OF_FIELD)
            message = f"`structured_outputs.{name}` needs a grammar: one of {fields}, or `response_format`"
            tools = name == "disable_additional_properties"
            tools_say = "; for `tools`, write `additionalProperties: false` in their `parameters`" if tools else ""
            raise RequestError(f"{message}{tools_say}.", param=f"structured_outputs.{name}")


def _source(wanted: Wanted, closed: bool) -> str:
    match wanted.kind:
        case "json_object":
            return ""
        case "json_schema":
            schema = schema_of(wanted.value, wanted.param)
            return compact(closed_schema(schema) if closed else schema)
        case "choice":
            return compact(wanted.value)
        case "structural_tag":
            tag = tag_of(schema_of(wanted.value, wanted.param), wanted.param)
            return (tag.with_schemas(closed_schema) if closed else tag).source()
    source: str = wanted.value
    return source


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def schema_of(value: Any, param: str) -> dict[str, Any]:
    """A JSON object that comes as one, or as its text. Raises RequestError that says where the text is wrong."""
    if isinstance(value, str):
        value = strict_json.field(value, param, depth=SCHEMA_DEPTH)
    if not isinstance(value, dict):
        raise RequestError(f"`{param}`: an object is expected, or its text.", param=param, code="invalid_type")
    return value


def closed_schema(schema: Any) -> Any:
    """The same without additional properties in any object whose properties it lists, unless it says something of them.

    As vLLM's `disable_additional_properties`. Conditions (`not`, `if`) stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    closed = with_below(schema, closed_schema, except_in=_CONDITIONS)
    if {"properties", "patternProperties"} & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed
