"""`incremental`: the built-in detokenizer. Each token is decoded once; text goes out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from core.batch import TokenLogprobs
from core.outputs import TokenDelta
from core.request import EngineRequest, FinishReason
from core.stages.detokenizer import DetokenizerContext, TextDelta
from core.stages.stop_strings import StopMatcher

if TYPE_CHECKING:
    from core.model.tokenizer import Tokenizer


class Incremental:
    """Joined deltas are the text of all output ids as it follows the prompt, up to the first stop string.

    - A character is delivered once its last byte is there; U+FFFD only for bytes that can never complete.
    - Text that may still become a stop string is withheld, and delivered when the sequence ends otherwise.
    - The EOS or stop token that ended a sequence has no text, unless include_stop_str_in_output.
    - A stop string that completes within the first min_tokens tokens is ordinary text.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        stream_interval: int = Field(
            1, ge=1, description="tokens per delta; the first token and the end go out at once"
        )

    def __init__(self, settings: Settings, context: DetokenizerContext) -> None:
        self._settings = settings
        self._tokenizer = context.tokenizer
        self._sequences: dict[str, _Sequence] = {}

    def start(self, request: EngineRequest) -> None:
        interval = request.params.stream_interval or self._settings.stream_interval
        self._sequences[request.request_id] = _Sequence(request, self._tokenizer, interval)

    def push(self, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
        return [text for delta in deltas if (text := self._push_one(delta)) is not None]

    def drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._sequences.pop(request_id, None)

    def _push_one(self, delta: TokenDelta) -> TextDelta | None:
        sequence = self._sequences.get(delta.request_id)
        if sequence is None:
            return None
        text = sequence.push(delta)
        if text is not None and text.finish_reason is not None:
            del self._sequences[delta.request_id]
        return text


class _Sequence:
    """One sequence's text so far. `_text`, `_token_ids` and `_logprobs` wait for the next delta to the client."""

    __slots__ = (
        "_eos_token_ids",
        "_interval",
        "_logprobs",
        "_matcher",
        "_num_tokens",
        "_params",
        "_request_id",
        "_stream",
        "_text",
        "_token_ids",
        "_undelivered_from",
    )

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, interval: int) -> None:
        params = request.params
        self._request_id = request.request_id
        self._params = params
        self._interval = interval
        self._eos_token_ids = tokenizer.eos_token_ids
        self._stream = tokenizer.stream(request.prompt_token_ids, params.skip_special_tokens, params.shown_token_ids)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if any(params.stop) else None
        self._num_tokens = 0
        self._undelivered_from = 0  # num_tokens at the last delta
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def push(self, delta: TokenDelta) -> TextDelta | None:
        silent_end = len(delta.token_ids) - 1 if self._ends_with_stop_token(delta) else len(delta.token_ids)
        for index, token_id in enumerate(delta.token_ids):
            self._token_ids.append(token_id)
            self._logprobs += delta.logprobs[index : index + 1]
            self._num_tokens += 1
            stop = self._add_text(self._stream.push(token_id)) if index < silent_end else None
            if stop is not None:
                return self._deliver(FinishReason.STOP, stop, stop_matched=True)
        if delta.finish_reason is not None:
            self._flush()
            return self._deliver(delta.finish_reason, delta.stop_reason)
        return self._deliver() if self._is_due() else None

    def _add_text(self, text: str) -> str | None:
        """The stop string that this text completes, or None."""
        if self._matcher is None:
            self._text.append(text)
            return None
        match = self._matcher.push(text, armed=self._num_tokens > self._params.min_tokens)
        self._text.append(match.text)
        return match.stop

    def _flush(self) -> None:
        held = self._matcher.flush() if self._matcher is not None else ""
        self._text += [held, self._stream.flush()]

    def _ends_with_stop_token(self, delta: TokenDelta) -> bool:
        if (
            delta.finish_reason is not FinishReason.STOP
            or not delta.token_ids
            or self._params.include_stop_str_in_output
        ):
            return False
        last = delta.token_ids[-1]
        return last == delta.stop_reason or (delta.stop_reason is None and last in self._eos_token_ids)

    def _is_due(self) -> bool:
        if self._num_tokens == self._undelivered_from:
            return False
        return self._undelivered_from == 0 or self._num_tokens - self._undelivered_from >= self._interval

    def _deliver(
        self,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        stop_matched: bool = False,
    ) -> TextDelta:
        delta = TextDelta(
            self._request_id,
            "".join(self._text),
            tuple(self._token_ids),
            tuple(self._logprobs),
            finish_reason,
            stop_reason,
            stop_matched,
        )
        self._undelivered_from = self._num_tokens
        self._text, self._token_ids, self._logprobs = [], [], []
        return delta
