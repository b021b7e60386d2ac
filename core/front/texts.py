"""Stage 8 as the front calls it: a detokenizer's failure is pinned on the sequence that caused it.

The detokenizer is given all of a step's tokens at once. Where that fails, or what it returns is not what its contract says,
each of these sequences is started anew with all its tokens so far, alone: whoever fails then is the one, and the text of
the others goes on from where their clients have it. This needs each sequence's ids and delivered text, which are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from core.batch import TokenLogprobs
from core.isolation.checks import copied
from core.isolation.front import BlamedError, Guard, MalformedError, is_encodable, kind_of
from core.outputs import TokenDelta
from core.request import EngineRequest, FinishReason
from core.stages.detokenizer import Detokenizer, TextDelta

NOT_FOR_CLIENTS = (FinishReason.ERROR, FinishReason.EXPIRED)
"""Ends that a client hears of as an error."""


@dataclass(frozen=True, slots=True)
class StepTexts:
    """A step's new text, and the sequences that failed with their messages."""

    texts: Sequence[TextDelta] = ()
    failed: Mapping[str, str] = field(default_factory=dict)  # request id -> message


@dataclass(slots=True)
class _Progress:
    """How far a sequence is. `said`: what the detokenizer has told since it (last) started it; the rest: the client."""

    said_tokens: int = 0
    said_chars: int = 0
    num_tokens: int = 0
    num_chars: int = 0
    ended: bool = False


class _Transcript:
    """One sequence: what the engine generated, and what the client has got of it."""

    __slots__ = ("_last", "_logprobs", "_progress", "_text", "_token_ids", "request")

    def __init__(self, request: EngineRequest):
        self.request = request
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # of tokens that are not delivered yet; empty where none are wanted
        self._text: list[str] = []
        self._progress = _Progress()
        self._last: TokenDelta | None = None

    def take(self, delta: TokenDelta) -> None:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._last = delta

    def start_over(self) -> TokenDelta:
        """Everything so far in one delta, for a detokenizer that knows nothing of the sequence any more."""
        self._progress = replace(self._progress, said_tokens=0, said_chars=0)
        reason, stop = (self._last.finish_reason, self._last.stop_reason) if self._last is not None else (None, None)
        ids = list(self._token_ids)
        return TokenDelta(request_id=self.request.request_id, token_ids=ids, finish_reason=reason, stop_reason=stop)

    def is_plain(self, told: TextDelta) -> bool:
        """The common case: the next tokens and their text, of a sequence that goes on as it began. It needs no new object."""
        at, ids = self._progress, told.token_ids
        return (
            told.finish_reason is None
            and told.stop_matched is False
            and type(told.text) is str
            and (told.text.isascii() or is_encodable(told.text))
            and type(ids) is tuple
            and at.said_tokens == at.num_tokens
            and at.said_chars == at.num_chars
            and self._token_ids[at.num_tokens : at.num_tokens + len(ids)] == list(ids)
            and not self._logprobs
            and told.logprobs == ()
        )

    def commit_plain(self, told: TextDelta) -> None:
        at = self._progress
        at.said_tokens = at.num_tokens = at.num_tokens + len(told.token_ids)
        at.said_chars = at.num_chars = at.num_chars + len(told.text)
        self._text.append(told.text)

    def judged(self, told: Sequence[TextDelta], end: TokenDelta | None) -> tuple[list[TextDelta], _Progress]:
        """What of `told` is new for the client, and the progress when it is delivered. Raises MalformedError.

        `end` is the engine's delta of this step where it ends the sequence.
        """
        progress, fresh = replace(self._progress), []
        for text in told:
            if progress.ended:
                raise MalformedError("it went on after the end of a sequence")
            self._check(text, progress, end)
            new, progress = self._fresh(text, progress)
            if new.text or new.token_ids or new.finish_reason is not None:
                fresh.append(new)
        if end is not None and not progress.ended:
            raise MalformedError("it did not tell the end of a sequence")
        return fresh, progress

    def commit(self, fresh: Sequence[TextDelta], progress: _Progress) -> None:
        del self._logprobs[: progress.num_tokens - self._progress.num_tokens]
        self._text += [text.text for text in fresh if text.text]
        self._progress = progress

    def _check(self, told: TextDelta, progress: _Progress, end: TokenDelta | None) -> None:
        if type(told.text) is not str or not is_encodable(told.text):
            raise MalformedError("it told what is no text")
        ids, start = told.token_ids, progress.said_tokens
        if type(ids) is not tuple or list(ids) != self._token_ids[start : start + len(ids)]:
            raise MalformedError("it told other token ids than it was given")
        if told.stop_matched:
            stops = self.request.params.stop
            if told.finish_reason is not FinishReason.STOP or told.stop_reason not in stops:
                raise MalformedError("it told of a stop string that nobody asked for")
        elif told.finish_reason is not (end.finish_reason if end is not None and told.finish_reason else None):
            raise MalformedError("it ended a sequence in another way than the engine did")
        elif told.finish_reason is not None and start + len(ids) != len(self._token_ids):
            raise MalformedError("it ended a sequence before its last token")

    def _fresh(self, told: TextDelta, at: _Progress) -> tuple[TextDelta, _Progress]:
        """Without what the client has already; ids and logprobs are the engine's own."""
        text = told.text
        if at.said_chars < at.num_chars:  # after a new start
            known = "".join(self._text)[at.said_chars :]
            if not (known.startswith(text) or text.startswith(known)):
                raise MalformedError("it told another text when it was given the same tokens again")
            text = text[len(known) :]
        tokens = max(at.num_tokens, at.said_tokens + len(told.token_ids))
        chars = max(at.num_chars, at.said_chars + len(told.text))
        taken = at.num_tokens - self._progress.num_tokens
        new = TextDelta(
            told.request_id,
            text,
            tuple(self._token_ids[at.num_tokens : tokens]),
            tuple(self._logprobs[taken : taken + tokens - at.num_tokens]),
            told.finish_reason,
            told.stop_reason if told.stop_matched or self._last is None else self._last.stop_reason,
            bool(told.stop_matched),
        )
        said_tokens, said_chars = at.said_tokens + len(told.token_ids), at.said_chars + len(told.text)
        return new, _Progress(said_tokens, said_chars, tokens, chars, told.finish_reason is not None)


class Texts:
    """All sequences in flight. What raises is the detokenizer's fault, and named so; `drop` never raises."""

    def __init__(self, detokenizer: Detokenizer, guard: Guard):
        self._detokenizer = detokenizer
        self._guard = guard
        self._transcripts: dict[str, _Transcript] = {}

    def __len__(self) -> int:
        return len(self._transcripts)

    def start(self, request: EngineRequest) -> None:
        """Raises GenerationError."""
        self._transcripts[request.request_id] = _Transcript(request)
        self._guard.call(self._detokenizer.start, _private(request))

    def push(self, deltas: Sequence[TokenDelta]) -> StepTexts:
        """What failed or expired is not for stage 8, and neither are sequences that ended here before."""
        ours = [d for d in deltas if d.request_id in self._transcripts and d.finish_reason not in NOT_FOR_CLIENTS]
        if not ours:
            return StepTexts()
        for delta in ours:
            self._transcripts[delta.request_id].take(delta)
        try:
            return StepTexts(self._guard.run(self._together, ours))
        except BlamedError as blamed:
            return self._one_by_one(ours, str(blamed))

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget sequences, also those that ended here: a detokenizer may have kept something. Unknown ids are ignored."""
        for request_id in request_ids:
            self._transcripts.pop(request_id, None)
        if request_ids:
            self._forget(list(request_ids))

    def _together(self, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
        """All or nothing: a sequence's progress changes only when the whole step is right."""
        told: object = self._detokenizer.push(list(deltas))
        if not isinstance(told, list | tuple):
            raise MalformedError(f"push returned {kind_of(told)}, not a list")
        by_id = self._by_id(told)
        ends = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
        plain: list[tuple[_Transcript, TextDelta]] = []
        judged: list[tuple[_Transcript, list[TextDelta], _Progress]] = []
        for key in (*by_id, *(key for key in ends if key not in by_id)):
            transcript, texts = self._transcripts[key], by_id.get(key, ())
            if len(texts) == 1 and key not in ends and transcript.is_plain(texts[0]):
                plain.append((transcript, texts[0]))
            else:
                judged.append((transcript, *transcript.judged(texts, ends.get(key))))
        return [*self._commit_plain(plain), *self._commit(judged)]

    def _by_id(self, told: Sequence[object]) -> dict[str, list[TextDelta]]:
        by_id: dict[str, list[TextDelta]] = {}
        for text in told:
            if type(text) is not TextDelta or text.request_id not in self._transcripts:
                raise MalformedError("push returned something else than texts of the sequences that it was given")
            by_id.setdefault(text.request_id, []).append(text)
        return by_id

    def _commit_plain(self, plain: Sequence[tuple[_Transcript, TextDelta]]) -> Iterator[TextDelta]:
        for transcript, text in plain:
            transcript.commit_plain(text)
            if text.text or text.token_ids:
                yield text

    def _commit(self, judged: Sequence[tuple[_Transcript, list[TextDelta], _Progress]]) -> Iterator[TextDelta]:
        for transcript, fresh, progress in judged:
            transcript.commit(fresh, progress)
            if progress.ended:
                del self._transcripts[transcript.request.request_id]
            yield from fresh

    def _one_by_one(self, deltas: Sequence[TokenDelta], reason: str) -> StepTexts:
        texts: list[TextDelta] = []
        failed: dict[str, str] = {}
        for key in dict.fromkeys(delta.request_id for delta in deltas):
            try:
                texts += self._guard.run(self._alone, key)
            except BlamedError as blamed:
                failed[key] = str(self._guard.error(str(blamed), blamed.__cause__))
                self.drop([key])
        if not failed:
            self._guard.error(f"{reason} (for several sequences at once, and for none of them alone)")
        return StepTexts(texts, failed)

    def _alone(self, key: str) -> list[TextDelta]:
        transcript = self._transcripts[key]
        self._detokenizer.drop([key])
        self._detokenizer.start(_private(transcript.request))
        return self._together([transcript.start_over()])

    def _forget(self, request_ids: list[str]) -> None:
        try:
            self._guard.run(self._detokenizer.drop, request_ids)
        except BlamedError as blamed:  # its own books are wrong; ours are not
            self._guard.error(str(blamed), blamed.__cause__)


def _private(request: EngineRequest) -> EngineRequest:
    """The engine, where it runs in this process, has the same objects."""
    return msgspec.structs.replace(
        request, prompt_token_ids=list(request.prompt_token_ids), params=copied(request.params)
    )
