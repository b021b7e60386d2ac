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
    """Config group `detokenizer`. Lives in the front process; called once per engine step with all new tokens.

    Example::

        from collections.abc import Sequence
        from dataclasses import replace

        from core.outputs import TokenDelta
        from core.stages.detokenizer import DetokenizerContext, TextDelta
        from core.stages.incremental import Incremental
        from pydantic import Field


        class Lumps(Incremental):  # its characters and stop strings; `start` is inherited
            class Settings(Incremental.Settings):
                min_chars: int = Field(default=0, ge=0, description="of a delta that is not the last")

            def __init__(self, settings: Settings, context: DetokenizerContext):
                super().__init__(settings, context)
                self._min_chars = settings.min_chars
                self._held: dict[str, TextDelta] = {}

            def push(self, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
                for new in super().push(deltas):
                    old = self._held.get(new.request_id, TextDelta(new.request_id))
                    ids, logprobs = old.token_ids + new.token_ids, old.logprobs + new.logprobs
                    new = replace(new, text=old.text + new.text, token_ids=ids, logprobs=logprobs)
                    self._held[new.request_id] = new
                whole = [d for d in self._held.values() if d.finish_reason or len(d.text) >= self._min_chars]
                return [self._held.pop(delta.request_id) for delta in whole]

            def drop(self, request_ids: Sequence[str]) -> None:
                super().drop(request_ids)
                for request_id in request_ids:
                    self._held.pop(request_id, None)
    """

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
