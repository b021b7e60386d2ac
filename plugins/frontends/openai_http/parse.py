"""Bytes -> a checked request body. Every way it can fail is a RequestError that names the field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from core.errors import RequestError, near_matches
from plugins.frontends.openai_http import strict_json
from plugins.frontends.openai_http.fields import check_fields, printable
from plugins.frontends.openai_http.near_fields import fields_at

if TYPE_CHECKING:
    from starlette.requests import Request

IN_THREAD_BYTES = 256 << 10  # larger bodies are parsed off the event loop
Checked = TypeVar("Checked")
BodyModel = TypeVar("BodyModel", bound=BaseModel)


async def read_body(request: Request, model: type[BodyModel], depth: int, spent: Callable[[float], None]) -> BodyModel:
    """Raises RequestError: 415 for another content type, 400 for everything else. `spent` is told the seconds it took."""
    _check_content_type(request.headers.get("content-type", ""))
    data = await request.body()
    started = time.perf_counter()
    try:
        if len(data) > IN_THREAD_BYTES:
            value = await asyncio.to_thread(strict_json.loads, data, depth=depth)
        else:
            value = strict_json.loads(data, depth=depth)
        if not isinstance(value, dict):
            raise strict_json.invalid("an object is expected")
        return validate(model, check_fields(value, model.model_fields))
    finally:
        spent(time.perf_counter() - started)


def _check_content_type(value: str) -> None:
    kind, _, parameters = value.lower().partition(";")
    charset = parameters.replace(" ", "").replace('"', "")
    if kind.strip() != "application/json" or charset not in ("", "charset=utf-8"):
        message = "The content type must be application/json."
        raise RequestError(message, param="content-type", code="unsupported_media_type", status=415)


def validate(kind: type[Checked] | TypeAdapter[Checked], value: Any, prefix: str = "") -> Checked:
    """Strict pydantic validation whose first error becomes a RequestError. `prefix` is the path to `value`."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = _first_error(error)
        param = _path(prefix, first["loc"])
        if first["type"] == "extra_forbidden":
            hint = near_matches(printable(str(first["loc"][-1])), fields_at(kind, first["loc"][:-1]))
            raise RequestError(f"Unknown field `{param}`{hint}", param=param, code="unknown_field") from None
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"`{param}`: {message}", param=param, code=_code(first["type"])) from None


def _first_error(error: ValidationError) -> Any:
    """The most telling one: of a union, the deepest branch."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    top = errors[0]["loc"][:1]
    return max((item for item in errors if item["loc"][:1] == top), key=lambda item: len(item["loc"]))


def _path(prefix: str, location: Sequence[int | str]) -> str:
    """`messages[0].content`; the names that pydantic gives to union branches and dict keys are left out."""
    path = prefix
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif "[" not in step:
            path += f".{printable(step)}" if path else printable(step)
    return path.removesuffix(".str")


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_field"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
