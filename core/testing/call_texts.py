"""Texts that a tool parser's grammar allows, written out: values of schemas between the texts of a structural tag.

For the schemas of the suite's own tools, and what a parser may put around them. No grammar backend is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.request import GrammarSpec

STRINGS = ("Oslo", "", 'São "Oslo" \\ {}', "</tool_call>", "[a, b](c='d')\n\t🔥", "}]}", "'")
NUMBERS = (0, 3, -17)
MAX_ITEMS = 3


@dataclass(frozen=True, slots=True)
class CallText:
    """A text of the grammar. `values`: every object in it that may be a call's arguments."""

    text: str
    values: tuple[dict[str, Any], ...]
    num_structures: int


def texts_of(spec: GrammarSpec, rng: random.Random, num: int) -> Iterator[CallText]:
    """Texts with calls and nothing else; none of a kind that cannot be written out without a backend."""
    if spec.kind == "structural_tag":
        tag = json.loads(spec.source)
        for _ in range(num):
            most = 1 if tag.get("stop_after_first") else MAX_ITEMS
            yield _of_tag(spec, tag, rng, rng.randint(1, most))
    elif spec.kind == "json_schema":
        schema = json.loads(spec.source)
        for _ in range(num):
            value = value_of(schema, schema, rng)
            yield CallText(_before(spec) + _written(spec, value), tuple(_objects(value)), 1)


def _of_tag(spec: GrammarSpec, tag: Mapping[str, Any], rng: random.Random, num: int) -> CallText:
    parts: list[str] = []
    values: list[dict[str, Any]] = []
    for _ in range(num):
        structure = rng.choice(tag["structures"])
        value = value_of(structure["schema"], structure["schema"], rng)
        parts.append(structure["begin"] + _written(spec, value) + structure["end"])
        values += _objects(value)
    return CallText(_before(spec) + tag.get("separator", "").join(parts), tuple(values), num)


def _before(spec: GrammarSpec) -> str:
    """An output that does not begin with `opening` is in the language from its start."""
    return spec.after if spec.after and not spec.opening else ""


def _written(spec: GrammarSpec, value: object) -> str:
    separators = (",", ":") if spec.any_whitespace else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def value_of(schema: Any, root: Any, rng: random.Random) -> Any:
    """A value that `schema` accepts. Raises NotImplementedError for what the suite's tools do not need."""
    if not isinstance(schema, dict) or not schema:
        return rng.choice(STRINGS)
    if "$ref" in schema:
        return value_of(_pointed(schema["$ref"], root), root, rng)
    if "const" in schema:
        return schema["const"]
    for name in ("enum", "anyOf", "oneOf"):
        if name in schema:
            chosen = rng.choice(schema[name])
            return chosen if name == "enum" else value_of(chosen, root, rng)
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    return _of_type(kinds if isinstance(kinds, str) else rng.choice(kinds), schema, root, rng)


def _of_type(kind: str, schema: Mapping[str, Any], root: Any, rng: random.Random) -> Any:
    match kind:
        case "object":
            required = schema.get("required", ())
            names = [name for name in schema.get("properties", ()) if name in required or rng.random() < 0.7]
            return {name: value_of(schema["properties"][name], root, rng) for name in names}
        case "array":
            least = schema.get("minItems", 0)
            num = rng.randint(least, max(least, min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS)))
            return [value_of(schema.get("items"), root, rng) for _ in range(num)]
        case "string":
            return rng.choice(STRINGS)
        case "integer" | "number":
            return rng.choice(NUMBERS)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    raise NotImplementedError(f"values of type {kind!r}")


def _pointed(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise NotImplementedError(f"$ref {reference!r}")
    for step in reference.removeprefix("#").split("/")[1:]:
        root = root[int(step) if isinstance(root, list) else step]
    return root


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        yield from _objects(part)
