"""Typed access to GGUF metadata: a value of the wrong type or range gives an error that names file and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from core.errors import ModelFileError

T = TypeVar("T")
MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MetadataFields:
    """`metadata` as read from the file; `source` is the file's name in messages.

    Each accessor takes a default for a missing key; the ones without a default raise ModelFileError.
    """

    metadata: Mapping[str, object]
    source: str = "GGUF metadata"

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.source}: {key}: {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self.metadata

    def require(self, key: str) -> object:
        if key not in self.metadata:
            self.fail(key, "is missing from the file")
        return self.metadata[key]

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        """An integer in [low, high]; floats and booleans are refused."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"should be an integer, is {_kind(value)}")
        if not low <= value <= high:
            self.fail(key, f"{value} is not from {low} to {high}")
        return value

    def optional_integer(self, key: str, *, low: int = 0, high: int = MAX_INTEGER) -> int | None:
        return self.integer(key, low=low, high=high) if key in self.metadata else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = default if default is not None and key not in self.metadata else self.require(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"should be a number, is {_kind(value)}")
        if not 0 < value < float("inf"):
            self.fail(key, f"{value} is not a finite number above zero")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "a boolean") if key in self.metadata else default

    def text(self, key: str) -> str:
        return self._typed(key, str, "a string")

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self.metadata else None

    def texts(self, key: str) -> tuple[str, ...]:
        return self._array(key, str, "strings")

    def integers(self, key: str) -> tuple[int, ...]:
        return self._array(key, int, "integers")

    def numbers(self, key: str) -> tuple[float, ...]:
        return self._array(key, float, "numbers")

    def flags(self, key: str) -> tuple[bool, ...]:
        return self._array(key, bool, "booleans")

    def _typed(self, key: str, kind: type[T], wanted: str) -> T:
        value = self.require(key)
        if not isinstance(value, kind):
            self.fail(key, f"should be {wanted}, is {_kind(value)}")
        return value

    def _array(self, key: str, kind: type[T], wanted: str) -> tuple[T, ...]:
        value = self.require(key)
        if not isinstance(value, tuple) or not all(type(item) is kind for item in value):
            self.fail(key, f"should be an array of {wanted}, is {_kind(value)}")
        return value


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"an array of {type(value[0]).__name__}" if value else "an empty array"
    return type(value).__name__
