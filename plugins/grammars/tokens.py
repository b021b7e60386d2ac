"""What backends make of a vocabulary, once, and how their messages read."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from core.stages.grammar import GrammarError, Vocabulary

MAX_MESSAGE = 400

Made = TypeVar("Made")


class Once(Generic[Made]):
    """Made at the first call. Two threads may load at once."""

    def __init__(self, make: Callable[[], Made]):
        self._make = make
        self._lock = Lock()
        self._made: Made | None = None

    def __call__(self) -> Made:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


class Tokens:
    """The vocabulary of a model that can end a sequence. Raises GrammarError for another one."""

    def __init__(self, vocabulary: Vocabulary):
        if not vocabulary.eos_ids:
            raise GrammarError("the model has no id that ends a sequence, so nothing can end with its grammar")
        self.vocabulary = vocabulary
        self.end = (min(vocabulary.eos_ids),)


def one_line(message: str, otherwise: str) -> str:
    return " ".join(message.split())[:MAX_MESSAGE] or otherwise
