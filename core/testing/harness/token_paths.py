"""A grammar backend without a tokenizer: an output is one of several lists of ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.grammar import GrammarContext, GrammarError, Mask, allow

Paths = Sequence[Sequence[int]]


def paths_spec(paths: Paths, backend: str = "paths") -> GrammarSpec:
    """As it comes to the engine."""
    return GrammarSpec(kind="choice", backend=backend, artifact=json.dumps([list(path) for path in paths]).encode())


class TokenPaths:
    """Each path ends with the id of an end."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: BaseModel | None = None, context: GrammarContext | None = None):
        self.num_loaded = 0

    def compile(self, spec: GrammarSpec) -> bytes:
        if not json.loads(spec.source):
            raise GrammarError("there is nothing to choose from")
        return spec.source.encode()

    def load(self, artifact: bytes) -> TokenPaths:
        self.num_loaded += 1
        self.paths = json.loads(artifact)
        return self

    def matcher(self) -> PathMatcher:
        return PathMatcher(self.paths)


class PathMatcher:
    def __init__(self, paths: list[list[int]]):
        self._paths = paths
        self.taken: list[int] = []
        self.calls: list[tuple[str, Any]] = []

    def accept(self, token_ids: Sequence[int]) -> int:
        self.calls.append(("accept", tuple(token_ids)))
        for count, token_id in enumerate(token_ids):
            if token_id not in self._next():
                return count
            self.taken.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.calls.append(("rollback", num_tokens))
        assert 0 < num_tokens <= len(self.taken)
        del self.taken[len(self.taken) - num_tokens :]

    def fill(self, mask: Mask) -> None:
        allow(mask, self._next())

    def forced(self) -> tuple[int, ...]:
        following = self._next()
        return tuple(following) if len(following) == 1 else ()

    def _next(self) -> set[int]:
        done = len(self.taken)
        return {path[done] for path in self._paths if path[:done] == self.taken and len(path) > done}
