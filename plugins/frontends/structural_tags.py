"""vLLM's two forms of `structural_tag` -> the one that grammar backends read (`core.request.GrammarSpec`).

The older one lists structures and triggers. The newer one is a `format` of xgrammar's, of which those are taken that say the
same: `triggered_tags`, `tags_with_separator` and `tag` around JSON schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from core.errors import RequestError
from core.stages.structural_tag import StructuralTag, Structure
from plugins.frontends.openai_http.parse import validate

MAX_TAG = 1 << 12  # characters
MAX_TAGS = 1 << 10
TAG_FORM: dict[str, Any] = {
    "anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": 1 << 20}, {"type": "null"}]
}
Tag = Annotated[str, Field(max_length=MAX_TAG)]
Begin = Annotated[str, Field(min_length=1, max_length=MAX_TAG)]
Begins = Annotated[list[Begin], Field(min_length=1, max_length=MAX_TAGS)]
Model = TypeVar("Model", bound=BaseModel)


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StructureForm(_Form):
    """`begin`, a value that the schema describes, `end`."""

    begin: Begin
    content: dict[str, Any] | bool = Field(alias="schema")
    end: Tag


class Structures(_Form):
    """vLLM's older form."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[StructureForm], Field(min_length=1, max_length=MAX_TAGS)]
    triggers: Begins


class JsonContent(_Form):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool


class TagFormat(_Form):
    type: Literal["tag"] = "tag"
    begin: Begin
    content: JsonContent
    end: Tag


TagFormats = Annotated[list[TagFormat], Field(min_length=1, max_length=MAX_TAGS)]


class TriggeredTags(_Form):
    type: Literal["triggered_tags"]
    triggers: Begins
    tags: TagFormats
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Form):
    type: Literal["tags_with_separator"]
    tags: TagFormats
    separator: Tag
    at_least_one: bool = False
    stop_after_first: bool = False


_FORMATS: dict[str, type[BaseModel]] = {
    "triggered_tags": TriggeredTags,
    "tags_with_separator": TagsWithSeparator,
    "tag": TagFormat,
}


def tag_of(tag: dict[str, Any], param: str) -> StructuralTag:
    """Raises RequestError with the path."""
    if "format" in tag:
        extra = sorted(tag.keys() - {"type", "format"})
        if extra or tag.get("type", "structural_tag") != "structural_tag":
            at = f"{param}.{extra[0] if extra else 'type'}"
            raise RequestError(f"`{at}` has no place beside `format`.", param=at, code="unknown_field")
        return _of_format(tag["format"], f"{param}.format")
    form = validate(Structures, tag, prefix=param)
    _check_triggers([one.begin for one in form.structures], form.triggers, f"{param}.structures")
    structures = (Structure(begin=one.begin, schema=one.content, end=one.end) for one in form.structures)
    return StructuralTag(structures=tuple(structures), triggers=tuple(form.triggers))


def _of_format(value: Any, param: str) -> StructuralTag:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(f"`{name}`" for name in _FORMATS)
        raise RequestError(f"`{param}.type` is one of {known}.", param=f"{param}.type", code="unsupported")
    form = validate(_FORMATS[kind], value, prefix=param)
    match form:
        case TriggeredTags():
            return _triggered(form, param)
        case TagsWithSeparator():
            return _separated(form, param)
        case TagFormat():
            return StructuralTag(
                structures=_structures([form]), triggers=(form.begin,), at_least_one=True, stop_after_first=True
            )
    raise AssertionError(kind)


def _triggered(form: TriggeredTags, param: str) -> StructuralTag:
    if form.at_least_one and not form.stop_after_first:
        at = f"{param}.at_least_one"
        message = f"`{at}` needs `stop_after_first` here: after the first tag free text could follow otherwise."
        raise RequestError(message, param=at, code="unsupported")
    _check_triggers([one.begin for one in form.tags], form.triggers, f"{param}.tags")
    return StructuralTag(
        structures=_structures(form.tags),
        triggers=tuple(form.triggers),
        at_least_one=form.at_least_one,
        stop_after_first=form.stop_after_first,
    )


def _separated(form: TagsWithSeparator, param: str) -> StructuralTag:
    if not form.at_least_one:
        at = f"{param}.at_least_one"
        raise RequestError(f"`{at}` must be true here: an answer is never empty.", param=at, code="unsupported")
    return StructuralTag(
        structures=_structures(form.tags),
        triggers=tuple(one.begin for one in form.tags),
        at_least_one=True,
        stop_after_first=form.stop_after_first,
        separator=form.separator,
    )


def _structures(tags: Sequence[TagFormat]) -> tuple[Structure, ...]:
    return tuple(Structure(begin=one.begin, schema=one.content.json_schema, end=one.end) for one in tags)


def _check_triggers(begins: Sequence[str], triggers: Sequence[str], param: str) -> None:
    for index, begin in enumerate(begins):
        if not any(begin.startswith(trigger) for trigger in triggers):
            at = f"{param}[{index}].begin"
            raise RequestError(f"`{at}` begins with none of the triggers.", param=at)
