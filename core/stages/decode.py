"""Stage 6, decode: how many tokens a request tries per step (R6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from core.request import Request


@dataclass(frozen=True, slots=True)
class DecodeContext:
    max_model_len: int


class Decode(Protocol):
    """Config group `decode`. Called once per step with all requests whose prompt is computed."""

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        """Draft token ids per request id, to be verified in the coming step; {} for plain decoding."""
        ...


class Plain:
    """One token per request per step."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: DecodeContext):
        pass

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        return {}
