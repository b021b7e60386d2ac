"""Values that make a request ask for something: one per field of SamplingParams, and the least that a params class takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from core.stages.logits_processor import parsed_params

FIELD_EXAMPLES: Mapping[str, Any] = MappingProxyType(
    {
        "min_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {17: 3.0},
        "allowed_token_ids": tuple(range(6, 300)),
        "bad_words_token_ids": ((42,), (40, 41)),
    }
)

CANDIDATES: tuple[Any, ...] = (1, 2, 0.5, 10, True, "a", [1], ["a"], {}, [], "word", 100)


def least_values(model: type[BaseModel]) -> dict[str, Any]:
    """Required fields alone, each with the first of `CANDIDATES` that it takes. Raises AssertionError where none fits."""
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if field.is_required():
            values[field.alias or name] = _fitting(model, field.alias or name)
    try:
        parsed_params(model, values)
    except ValidationError as error:
        raise AssertionError(f"give `asks`: {model.__name__} does not take {values}: {error}") from None
    return values


def _fitting(model: type[BaseModel], key: str) -> Any:
    for candidate in CANDIDATES:
        try:
            parsed_params(model, {key: candidate})
        except ValidationError as error:
            if any(problem["loc"][:1] == (key,) for problem in error.errors()):
                continue
        return candidate
    raise AssertionError(f"give `asks`: no example value fits {model.__name__}.{key}")
