"""One client's call while it is in flight: its choices, what is ready to deliver, and its times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from core.batch import TokenLogprobs
from core.front.spans import FirstToken, Moments, StageSeconds, StageWork, Work, stage_spans
from core.outputs import CompletionOutput, RequestOutput, RequestRecord, StageSpan, Timings, TokenDelta, Usage
from core.request import EngineRequest, FinishReason, SamplingParams
from core.stages.completion import timings_of
from core.stages.detokenizer import TextDelta
from core.stages.frontend import GenerateRequest
from core.stages.renderer import ChatPrompt


class Phase(Enum):
    """Where a call is in its life; every one after OPEN is final."""

    OPEN = "open"
    FINISHED = "finished"  # every choice has ended
    FAILED = "failed"  # one error is still to be raised
    LEFT = "left"  # its client went away: nothing more is delivered


@dataclass(slots=True, eq=False)
class Choice:
    """One of the n sequences of a call. Times are monotonic seconds."""

    call: Call
    index: int
    request_id: str  # the engine's id
    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    ended: bool = False

    def note(self, delta: TokenDelta, now: float) -> None:
        """Take in the numbers of an engine delta; its text comes by `deliver`."""
        self.scheduled_time = delta.scheduled_time if self.scheduled_time is None else self.scheduled_time
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        if delta.prompt_logprobs:
            self.call.prompt_logprobs = tuple(delta.prompt_logprobs)
        if delta.token_ids:
            if self.first_token_time is None:
                self.first_token_time = now
                self.call.note_first_token(now)
            self.last_token_time = now
            self.num_tokens += len(delta.token_ids)

    def deliver(self, text: TextDelta) -> None:
        self.call.num_delivered += len(text.token_ids)
        self.finish_reason = text.finish_reason
        self.ended = text.finish_reason is not None
        self.call.put(
            CompletionOutput(
                index=self.index,
                text=text.text,
                token_ids=text.token_ids,
                logprobs=text.logprobs,
                finish_reason=text.finish_reason,
                stop_reason=text.stop_reason,
                timings=self.timings() if self.ended else None,
            )
        )

    def timings(self) -> Timings:
        return timings_of(
            self.call.arrival, self.scheduled_time, self.first_token_time, self.last_token_time, self.num_tokens
        )


@dataclass(slots=True, eq=False)
class Call:
    """A call of one client; `next_output` hands out what has come since the last time.

    `key` names it in this process and is never used again, whatever ids clients choose.
    """

    key: str
    request: GenerateRequest
    prompt_token_ids: list[int]
    params: SamplingParams
    work: StageWork
    arrival: float  # monotonic seconds, as all its moments
    rendered: float
    registered: float | None = None  # None until then
    sequences: tuple[EngineRequest, ...] = ()
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_prompt_tokens: int = field(init=False)
    num_delivered: int = 0  # generated tokens over all choices
    admit_s: float = 0.0
    _work_at_start: StageSeconds = field(default_factory=StageSeconds)  # when it was registered
    _first_token: FirstToken | None = None
    _shown_prompt: list[int] = field(init=False)  # for the frontend; the engine has the other list
    _phase: Phase = Phase.OPEN
    _ready: list[CompletionOutput] = field(default_factory=list)
    _error: Exception | None = None  # of a failed call, until it is raised
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._shown_prompt = list(self.prompt_token_ids)

    @property
    def num_open(self) -> int:
        return sum(not choice.ended for choice in self.choices)

    def note_registered(self, now: float) -> None:
        self.registered = now
        self._work_at_start = self.work.after(now)

    def note_first_token(self, now: float) -> None:
        """A choice has got its first token."""
        if self._first_token is None:
            self._first_token = FirstToken(self.work.before(), self.work.after(now), self.work.sample_s)

    def put(self, output: CompletionOutput) -> None:
        self._ready.append(output)
        self._event.set()

    def finish(self) -> None:
        self._end(Phase.FINISHED)

    def fail(self, error: Exception) -> None:
        """What was delivered stays delivered; then the error comes, once."""
        if self._end(Phase.FAILED):
            self._error = error

    def leave(self) -> None:
        """Wakes whoever waits: there is nothing more for it."""
        if self._end(Phase.LEFT):
            self._ready.clear()

    def _end(self, phase: Phase) -> bool:
        self._event.set()
        if self._phase is not Phase.OPEN:
            return False
        self._phase = phase
        return True

    async def next_output(self) -> RequestOutput | None:
        """The next deltas; None after the last. Raises the call's error after the deltas that came before it."""
        if not self._ready and self._phase is Phase.OPEN:
            self._event.clear()
            await self._event.wait()
        outputs, self._ready = tuple(self._ready), []
        if outputs:
            return self._output(outputs)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def _output(self, outputs: tuple[CompletionOutput, ...]) -> RequestOutput:
        finished = self._phase is Phase.FINISHED
        return RequestOutput(
            request_id=self.request.request_id,
            outputs=outputs,
            prompt_token_ids=self._shown_prompt,
            prompt_logprobs=self.prompt_logprobs,
            finished=finished,
            usage=self.usage() if finished else None,
        )

    def usage(self) -> Usage:
        cached = min((choice.num_cached_tokens for choice in self.choices), default=0)
        return Usage(self.num_prompt_tokens, self.num_delivered, cached)

    def record(self, now: float, replace_open: FinishReason | None, error: str | None) -> RequestRecord:
        reasons = tuple(choice.finish_reason or replace_open or FinishReason.ABORT for choice in self.choices)
        first = self.choices[0].timings() if self.choices else Timings()
        timings = Timings(queue=first.queue, ttft=first.ttft, tpot=first.tpot, e2e=max(now - self.arrival, 0.0))
        return RequestRecord(
            request_id=self.request.request_id,
            tenant=self.request.tenant,
            finish_reasons=reasons,
            usage=self.usage(),
            timings=timings,
            num_preemptions=sum(choice.num_preemptions for choice in self.choices),
            render_s=max(self.rendered - self.arrival, 0.0),
            admit_s=max(self.admit_s, 0.0),
            error=error,
            operation="chat" if isinstance(self.request.prompt, ChatPrompt) else "text_completion",
            trace_context=self.request.trace_context,
            spans=self._spans(now),
        )

    def _spans(self, now: float) -> tuple[StageSpan, ...]:
        work = Work(self._work_at_start, self._first_token, self.work.after(now), self.admit_s)
        return stage_spans(self._moments(now), work, finished=self._phase is Phase.FINISHED)

    def _moments(self, now: float) -> Moments:
        def known(times: Iterable[float | None]) -> list[float]:
            return [at for at in times if at is not None]

        received = self.request.received_time
        return Moments(
            received=self.arrival if received is None else received,
            arrival=self.arrival,
            rendered=self.rendered,
            registered=self.rendered if self.registered is None else self.registered,
            scheduled=min(known(choice.scheduled_time for choice in self.choices), default=None),
            first_token=min(known(choice.first_token_time for choice in self.choices), default=None),
            last_token=max(known(choice.last_token_time for choice in self.choices), default=None),
            end=now,
        )
