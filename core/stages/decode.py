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
    """Config group `decode`. Called once per step with all requests whose prompt is computed.

    A class that never proposes anything may say so, and is not asked: `proposes = False` in its body (plugin API 1.2).

    Example::

        from collections.abc import Mapping, Sequence

        from core.request import Request
        from core.stages.decode import DecodeContext, num_drafts_left
        from pydantic import BaseModel, ConfigDict, Field


        class Repeats:  # what followed the newest token where it stood before
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                num_drafts: int = Field(default=4, ge=1)

            def __init__(self, settings: Settings, context: DecodeContext):
                self._most, self._max_model_len = settings.num_drafts, context.max_model_len

            def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
                return {request.request_id: drafts for request in requests if (drafts := self._drafts(request))}

            def _drafts(self, request: Request) -> tuple[int, ...]:
                *before, newest = [*request.prompt_token_ids, *request.output_token_ids]
                if newest not in before:
                    return ()
                start = len(before) - before[::-1].index(newest)
                most = min(self._most, num_drafts_left(request, self._max_model_len))
                return tuple([*before, newest][start : start + most])
    """

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        """Draft token ids per request id, to be verified in the coming step; {} for plain decoding.

        Only for `requests`, which are not to be changed, and no more of them than `num_drafts_left`. When this raises it is
        asked request by request: one for which it raises again, or whose drafts are no token ids, ends with an error.
        """
        ...


def num_drafts_left(request: Request, max_model_len: int) -> int:
    """How many drafts can count: a step samples one id beyond them, and the request ends where it is full."""
    room = min(request.params.max_tokens - request.num_output_tokens, max_model_len - request.num_tokens)
    return max(room - 1, 0)


class Plain:
    """One token per request per step."""

    proposes = False

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: DecodeContext):
        pass

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        return {}
