"""What a client's grammar may be, judged before anything compiles it: in linear time, without recursion. Imports no torch.

Engines have died of each of these (llama.cpp 26600, 25283; CVE-2025-57809, CVE-2025-58446, GHSA-7rgv-gqhr-fxg3): nesting that
overflows a stack, enums of thousands of values, repetitions of repetitions. What a backend still finds too hard is stopped by the
limits of the process that compiles.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from core.errors import RequestError, printable
from core.grammar.pattern_bounds import OutOfBoundsError, check_ebnf, check_regex
from core.request import JSON_KINDS, GrammarSpec
from core.stages.grammar import GrammarError
from core.stages.structural_tag import structural_tag

if TYPE_CHECKING:
    from core.settings import StructuredOutputSettings

# A whole string, or all that is left where it has no end: each character is looked at once.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_BOUNDED_LISTS = frozenset(
    {"enum", "type", "anyOf", "oneOf", "allOf", "prefixItems", "items", "structures", "triggers"}
)


def bounded(spec: GrammarSpec, limits: StructuredOutputSettings, param: str) -> GrammarSpec:
    """The same language, its JSON as everyone would write it. Raises RequestError for `param` where it is out of bounds."""
    try:
        source = _bounded_source(spec, limits)
    except OutOfBoundsError as error:
        raise RequestError(f"{param}: {error}", param=param, code=error.code) from None
    any_whitespace = spec.any_whitespace and (limits.any_whitespace or spec.kind not in JSON_KINDS)
    return msgspec.structs.replace(spec, source=source, artifact=b"", any_whitespace=any_whitespace)


def _bounded_source(spec: GrammarSpec, limits: StructuredOutputSettings) -> str:
    if spec.kind == "json_object":
        return ""
    num_bytes = _num_bytes(spec.source)
    if num_bytes > limits.max_bytes:
        raise OutOfBoundsError(f"{_NAMES[spec.kind]} has {num_bytes} bytes, {_limit(limits.max_bytes, 'max_bytes')}")
    if spec.kind == "regex":
        check_regex(spec.source, limits)
        return spec.source
    if spec.kind == "ebnf":
        check_ebnf(spec.source, limits)
        return spec.source
    return _bounded_json(spec, limits)


_NAMES = {
    "json_schema": "the schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "ebnf": "the grammar",
    "structural_tag": "the structural tag",
}


def _limit(limit: int, key: str) -> str:
    return f"and {limit} is the limit (structured_outputs.{key})"


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise OutOfBoundsError("text has a lone surrogate", "invalid_unicode") from None


def _bounded_json(spec: GrammarSpec, limits: StructuredOutputSettings) -> str:
    what = _NAMES[spec.kind]
    _check_brackets(spec.source, limits, what)
    value = _parsed(spec.source, what)
    _check_nodes(value, limits)
    _check_shape(spec.kind, value, limits)
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    _num_bytes(written)  # "\ud800" was a lone surrogate that JSON can carry
    return written


def _check_brackets(text: str, limits: StructuredOutputSettings, what: str) -> None:
    """Levels and nodes, before a parser that recurses sees the text."""
    depth = num_nodes = 0
    for found in _JSON_TOKEN.finditer(text):
        part = found[0]
        if part in "[{":
            depth, num_nodes = depth + 1, num_nodes + 1
            if depth > limits.max_depth:
                raise OutOfBoundsError(f"{what} is nested too deeply, {_limit(limits.max_depth, 'max_depth')}")
            if num_nodes > limits.max_nodes:
                raise OutOfBoundsError(f"{what} has too many parts, {_limit(limits.max_nodes, 'max_nodes')}")
        elif part in "]}":
            depth -= 1


def _parsed(text: str, what: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError("a number is too large")
        return value

    def integer(digits: str) -> int:
        number(digits)  # one that is no float anywhere is no number to compare with
        return int(digits)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number, parse_int=integer)
    except ValueError as error:
        raise OutOfBoundsError(f"{what} is no JSON: {printable(str(error))}", "invalid_grammar") from None


def _check_nodes(value: object, limits: StructuredOutputSettings) -> None:
    """Long lists, and patterns, wherever a schema may have them."""
    for key, node in _nodes(value):
        if isinstance(node, list) and key in _BOUNDED_LISTS and len(node) > limits.max_choices:
            raise OutOfBoundsError(f"{key} has {len(node)} entries, {_limit(limits.max_choices, 'max_choices')}")
        if isinstance(node, dict):
            if isinstance(pattern := node.get("pattern"), str):
                check_regex(pattern, limits)
            if isinstance(patterns := node.get("patternProperties"), dict):
                for pattern in patterns:
                    check_regex(pattern, limits)


def _nodes(value: object) -> Iterator[tuple[str, object]]:
    """Each object and list, with the key that it is the value of."""
    left: list[tuple[str, object]] = [("", value)]
    while left:
        key, node = left.pop()
        yield key, node
        if isinstance(node, dict):
            left += [(name, item) for name, item in node.items() if isinstance(item, dict | list)]
        elif isinstance(node, list):
            left += [("", item) for item in node if isinstance(item, dict | list)]


def _check_shape(kind: str, value: object, limits: StructuredOutputSettings) -> None:
    if kind == "json_schema" and not isinstance(value, dict | bool):
        raise OutOfBoundsError(f"a JSON schema is an object, true or false, not {_kind_of(value)}", "invalid_grammar")
    if kind == "choice":
        _check_choices(value, limits)
    if kind == "structural_tag":
        _check_tags(value)


def _check_choices(value: object, limits: StructuredOutputSettings) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise OutOfBoundsError("the choices are a list of texts, and at least one", "invalid_grammar")
    if len(value) > limits.max_choices:
        raise OutOfBoundsError(f"there are {len(value)} choices, {_limit(limits.max_choices, 'max_choices')}")


def _check_tags(value: object) -> None:
    try:
        structural_tag(value)
    except GrammarError as error:
        raise OutOfBoundsError(printable(str(error)), "invalid_grammar") from None


def _kind_of(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
