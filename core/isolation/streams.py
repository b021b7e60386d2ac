"""A plugin's stream of one choice's text as frontends see it: each piece is checked, and the first failure is its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from core.errors import GenerationError
from core.isolation.front import Guard, MalformedError, kind_of

R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
R = TypeVar("R")


class TextStream(Protocol[R_co]):
    """What the streams of tool and reasoning parsers have in common."""

    def push(self, text: str) -> R_co: ...

    def finish(self) -> R_co: ...


class CheckedStream(Generic[R]):
    """After an error every call raises it again. `check` raises MalformedError; `nothing` is what no text brings."""

    def __init__(self, stream: TextStream[object], guard: Guard, check: Callable[[object], R], nothing: R):
        self._stream = stream
        self._guard = guard
        self._check = check
        self._nothing = nothing
        self._error: GenerationError | None = None

    def push(self, text: str) -> R:
        return self._checked(self._stream.push, text) if text else self._nothing

    def finish(self) -> R:
        return self._checked(self._stream.finish)

    def _checked(self, fn: Callable[..., object], *args: str) -> R:
        if self._error is not None:
            raise self._error
        try:
            return self._guard.call(lambda: self._check(fn(*args)))
        except GenerationError as error:
            self._error = error
            raise


def opened(stream: S, contract: str) -> S:
    """What a parser's `stream` returned. Raises MalformedError where it is no stream; `contract`: the name of one."""
    if not (callable(getattr(stream, "push", None)) and callable(getattr(stream, "finish", None))):
        raise MalformedError(f"stream returned {kind_of(stream)}, which is no {contract}")
    return stream
