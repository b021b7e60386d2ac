"""The fields that a body may have where it has one that there is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def fields_at(kind: Any, location: Sequence[int | str]) -> frozenset[str]:
    """Names that clients write in the objects at `location` of a body of `kind`, as a pydantic error has it."""
    kinds = [kind]
    for step in location:
        # a step of a list, or pydantic's name for a branch of a union, leads to no field
        inside = [one for model in _models(kinds) if (one := _annotation(model, step)) is not None]
        kinds = inside or kinds
    return frozenset(name for model in _models(kinds) for name in names_of(model))


def names_of(model: type[BaseModel]) -> Iterator[str]:
    return (field.alias or name for name, field in model.model_fields.items())


def _annotation(model: type[BaseModel], name: int | str) -> Any:
    found = (one.annotation for field, one in model.model_fields.items() if name == (one.alias or field))
    return next(found, None)


def _models(kinds: Sequence[Any]) -> Iterator[type[BaseModel]]:
    """Those within lists, unions and annotations."""
    left = list(kinds)
    while left:
        one = left.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
        else:
            left += get_args(one)
