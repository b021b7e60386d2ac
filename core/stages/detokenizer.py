"""Stage 8, detokenizer: token ids -> text; UTF-8 boundaries, stop strings, `stream_interval` (R8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.batch import TokenLogprobs
from core.outputs import TokenDelta
from core.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from core.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DetokenizerContext:
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence. Emitted only when there is something to deliver (`stream_interval`) or at the end.

    When a stop string matched, `finish_reason` is stop, `stop_reason` the string, and the engine must be told to
    abort the sequence (`stop_matched`), since it does not look at text.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stop_matched: bool = False


class Detokenizer(Protocol):
    """Config group `detokenizer`. Lives in the front process; called once per engine step with all new tokens."""

    def start(self, request: EngineRequest) -> None:
        """Register a sequence."""
        ...

    def push(self, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
        """Turn new ids into text. Deltas of unknown (ended, aborted) sequences are ignored. Never raises on any ids.

        A delta with a finish_reason flushes what is held back and drops the sequence's state.
        """
        ...

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget sequences that ended otherwise. Unknown ids are ignored."""
        ...
