"""Which keys a settings class knows, at any depth, and what to say of one that is wrong. Imports no torch.

pydantic names a problem by a path of keys, list positions, and labels of the branches of a union. Here that path is walked
along the types of the fields, so that a message names a key as it is written in a config, and the keys that may stand there.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError

from core.errors import ConfigError, near_matches, printable, shown

S = TypeVar("S", bound=BaseModel)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
MAX_DEPTH = 4  # of nested models that a hint looks into
MAX_EXAMPLE = 60  # characters of a value that is shown again as it should be
_HOLDS_KEYS = "it holds keys of its own"
LISTS = ("tuple_type", "list_type", "set_type", "frozen_set_type")
NEAR = 0.7  # likeness from which a key elsewhere is worth naming


def _of_nobody(key: str) -> Sequence[str]:
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """The component that the values are of, for messages: scheduler=fcfs. `owners`: others of its group that have a key."""

    group: str
    name: str
    owners: Callable[[str], Sequence[str]] = _of_nobody


def validated(model: type[S], values: object, path: str, also: Sequence[str] = (), option: Option | None = None) -> S:
    """`model(**values)`. Raises ConfigError with the full key of each problem and near matches (`also`: more legal keys)."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"config key {path!r}: {_HOLDS_KEYS} (got {shown(values)})", path)
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise explained(model, error, path, also, option) from None


def explained(
    model: type[BaseModel], error: ValidationError, path: str, also: Sequence[str] = (), option: Option | None = None
) -> ConfigError:
    """One text per key: the branches of a union give a problem each."""
    known: dict[str, set[str]] = {}  # unknown key -> what may stand in its place
    wrong: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        if problem["type"] in UNKNOWN:
            place, found = _walk(model, problem["loc"][:-1], path)
            keys = known.setdefault(f"{place}.{problem['loc'][-1]}", set())
            keys.update(name for t in found for name in fields_of(t))
        else:
            key, text = _wrong(model, problem, path)
            if text not in wrong.setdefault(key, []):
                wrong[key].append(text)
    texts = [
        _unknown(key, keys, also, option) if key.rpartition(".")[0] == path else _unknown(key, keys)
        for key, keys in known.items()
    ]
    texts += [f"config key {key!r}: {', or '.join(found)}" for key, found in wrong.items()]
    return ConfigError("; ".join(texts), next(iter((*known, *wrong))), unknown=bool(known))


def _unknown(key: str, known: set[str], also: Sequence[str] = (), option: Option | None = None) -> str:
    """`also` may be meant, and is no choice on its own: every component has a `name`."""
    place, _, word = key.rpartition(".")
    if option is not None and (owners := option.owners(word)):
        return f"unknown config key {key!r}; {_of_others(key, option, owners)}"
    near = near_matches(word, {*known, *also})
    if "did you mean" not in near:
        who = f"{option.group}={option.name}" if option is not None else place
        near = near_matches(word, known) if known else f"; {who} has no settings"
    return f"unknown config key {key!r}{near}"


def _of_others(key: str, option: Option, owners: Sequence[str]) -> str:
    choices = [f"{option.group}={name}" for name in owners]
    return (
        f"it is a key of {' and '.join(choices)}, and {option.group}={option.name} is selected: "
        f"select {' or '.join(choices)}, or leave {key} out"
    )


def _wrong(model: type[BaseModel], problem: Any, path: str) -> tuple[str, str]:
    place, found = _walk(model, problem["loc"], path)
    given = problem.get("input")
    if problem["type"] == "missing":
        return place, "it must be set"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type") and found:
        keys = [name for t in found for name in fields_of(t)]
        example = f"{place}.{keys[0] if keys else '<name>'}"
        return place, f"{_HOLDS_KEYS}, as in {example}=… (got {shown(given)})"
    if problem["type"] in LISTS and isinstance(given, str):
        return place, f"it should be a list; write {_as_list(given)} (got {shown(given)})"
    choices = [choice for t in found for choice in get_args(t) if get_origin(t) is Literal and isinstance(choice, str)]
    near = near_matches(given, choices) if isinstance(given, str) else ""
    about = _description(model, problem["loc"]) if problem["type"] == "string_pattern_mismatch" else ""
    near = near if near.startswith("; did") else ""
    text = f"it should be {about}" if about else printable(problem["msg"])
    return place, f"{text} (got {shown(given)}){near}"


def _as_list(text: str) -> str:
    """`anna, bert` as YAML and the command line take it."""
    plain = text.isprintable() and len(text) < MAX_EXAMPLE and not set(text) & set("[]{}\"'#:")
    return f"[{text.strip()}]" if plain and text.strip() else "[a, b]"


def _description(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Of the field itself, where it is one of the model's own."""
    field = model.model_fields.get(str(loc[0])) if len(loc) == 1 else None
    return (field.description or "") if field is not None else ""


def _walk(model: type[BaseModel], loc: Sequence[int | str], path: str) -> tuple[str, list[Any]]:
    """The dotted key that `loc` leads to, and the types that may stand there."""
    found: list[Any] = [model]
    for element in loc:
        inner = [t for outer in found for t in _inside(outer, element)]
        if inner or isinstance(element, int):
            path, found = f"{path}.{element}", inner
        elif (
            len(found) < 2
        ):  # neither a field nor a branch of a union: a key of a mapping, or what a validator calls itself
            path = path if element == "[key]" or "[" in str(element) else f"{path}.{element}"
        else:
            found = [t for t in found if getattr(t, "__name__", None) == element] or found
    return path, found


def _inside(outer: Any, element: int | str) -> list[Any]:
    """The types of what lies at `element` of a value of type `outer`; none where nothing does."""
    if (annotation := fields_of(outer).get(str(element))) is not None:
        return branches(annotation)
    origin, arguments = get_origin(outer), [a for a in get_args(outer) if a is not Ellipsis]
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
        return branches(arguments[1])
    if isinstance(element, int) and isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        return branches(arguments[min(element, len(arguments) - 1)]) if arguments else []
    return []


def branches(annotation: Any) -> list[Any]:
    """The types of a union, or the one type that it is; without None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return branches(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [t for branch in get_args(annotation) for t in branches(branch)]
    return [] if annotation is type(None) else [annotation]


def fields_of(t: Any) -> dict[str, Any]:
    """Key -> annotation of a model or dataclass; nothing for another type. A key is the alias where a field has one."""
    if isinstance(t, type) and issubclass(t, BaseModel) and not issubclass(t, RootModel):
        return {field.alias or name: field.annotation for name, field in t.model_fields.items()}
    if isinstance(t, type) and dataclasses.is_dataclass(t):
        return {field.name: field.type for field in dataclasses.fields(t)}
    return {}


def keys_of(model: type[BaseModel], depth: int = MAX_DEPTH) -> Iterator[str]:
    """Every key, those of nested models with dots: host, limits, limits.connections …"""
    for name, annotation in fields_of(model).items():
        yield name
        for inner in branches(annotation) if depth > 1 else ():
            yield from (f"{name}.{key}" for key in keys_of(inner, depth - 1))


def nearest(word: str, keys: Sequence[str], cutoff: float = NEAR) -> list[str]:
    """The keys, or ends of keys, that look like `word`, best first, three at most: `port` leads to frontend.port."""
    scored: dict[str, float] = {}
    for key in keys:
        parts = key.split(".")
        for start in range(len(parts)):
            score = SequenceMatcher(None, word.casefold(), ".".join(parts[start:]).casefold()).ratio()
            scored[key] = max(score, scored.get(key, 0.0))
    near = sorted((key for key, score in scored.items() if score >= cutoff), key=lambda key: (-scored[key], key))
    exact = [key for key in near if scored[key] == 1.0]
    return (exact or near)[:3]
