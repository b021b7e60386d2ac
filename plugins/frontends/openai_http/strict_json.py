"""JSON as RFC 8259 means it: UTF-8 without BOM, unique keys, finite numbers, bounded depth, no lone surrogates."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from core.errors import RequestError


def invalid(message: str) -> RequestError:
    return RequestError(f"The body is not valid JSON: {message}.", code="invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise invalid("an object has the same key twice")
    return members


def _no_constant(_word: str) -> NoReturn:
    raise invalid("NaN and Infinity are not JSON numbers")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise invalid("a number is too large")
    return number


def _decode(body: bytes) -> str:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid("it is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise invalid("it starts with a byte order mark")
    return text


def _children(value: Any) -> list[Any]:
    members = value.values() if isinstance(value, dict) else value
    return [member for member in members if isinstance(member, (dict, list))]


def _check_depth(value: Any, depth: int) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise invalid(f"it is nested deeper than {depth} levels")


def _check_surrogates(value: Any) -> None:
    """`"\\ud800"` parses into a str that no encoder accepts: refuse it here rather than fail later."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("a string holds half of a surrogate pair") from None


def loads(body: bytes, *, depth: int = 64) -> Any:
    """Parse `body`. Raises RequestError with code `invalid_json`."""
    text = _decode(body)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise invalid(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise invalid(f"it is nested deeper than {depth} levels") from None
    except ValueError:  # an integer of thousands of digits
        raise invalid("a number is too large") from None
    if text.count("[") + text.count("{") > depth:  # fewer brackets cannot nest deeper
        _check_depth(value, depth)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def field(text: str, param: str, *, depth: int) -> Any:
    """Parse a field that holds JSON as a text. Raises RequestError that names it."""
    try:
        return loads(text.encode("utf-8", "surrogatepass"), depth=depth)
    except RequestError as error:
        message = error.message.replace("The body", f"`{param}`", 1)
        raise RequestError(message, param=param, code="invalid_json") from None
