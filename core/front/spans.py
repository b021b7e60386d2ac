"""Where the time of a request went: one interval per stage, and how long the stage was at work in it.

The engine tells each step's seconds by stage. The front adds them up, one sum for all requests, and a request keeps the
sums as they stood at its own turning points: nothing here costs anything per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from core.outputs import StageSpan, StepStats

_NO_STEP = StepStats()


@dataclass(slots=True)
class StageSeconds:
    """Seconds that stages have worked."""

    scheduler: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    sampler: float = 0.0
    detokenizer: float = 0.0
    completion: float = 0.0

    def add(self, stats: StepStats) -> None:
        """The forward pass is shared by stages 5 and 6: split by their tokens."""
        model_s = stats.build_s + stats.forward_s
        prefill_s = model_s * stats.num_prefill_tokens / (stats.num_scheduled_tokens or 1)
        self.scheduler += stats.schedule_s
        self.prefill += prefill_s
        self.decode += model_s - prefill_s
        self.sampler += stats.sample_s
        self.detokenizer += stats.detokenize_s
        self.completion += stats.output_s


class StageWork:
    """What the stages have worked since the front started, and the step whose output the front has in hand."""

    def __init__(self) -> None:
        self._total = StageSeconds()  # of all steps before the one in hand
        self._step = _NO_STEP
        self._step_start = 0.0

    def begin(self, step: StepStats, now: float) -> None:
        """The output of `step` has come at `now`."""
        self._step = step
        self._step_start = now

    def end(self, step: StepStats) -> None:
        """The output is dealt with; `step` now has the detokenizer's seconds too."""
        self._total.add(step)
        self._step = _NO_STEP

    @property
    def sample_s(self) -> float:
        """Of the step in hand."""
        return self._step.sample_s

    def before(self) -> StageSeconds:
        """Without the step in hand."""
        return replace(self._total)

    def after(self, now: float) -> StageSeconds:
        """With the step in hand, as far as it has come."""
        total = replace(self._total)
        total.add(self._step)
        if self._step is not _NO_STEP:
            total.detokenizer += max(now - self._step_start, 0.0)
        return total


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What is kept when the first token of a call comes."""

    before: StageSeconds  # the step that made it left out
    after: StageSeconds  # that step included
    sample_s: float  # stage 7 in that step


@dataclass(frozen=True, slots=True)
class Moments:
    """Turning points of one call in monotonic seconds, in this order; None where it never came so far."""

    received: float  # the frontend began to read it
    arrival: float  # rendering began
    rendered: float
    registered: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    end: float

    def in_order(self) -> Moments:
        """None earlier than the one before it, whatever the clock did."""
        if self.scheduled is None and self.first_token is not None:
            return replace(self, scheduled=self.registered).in_order()
        known = [(name, value) for name in self.__slots__ if (value := getattr(self, name)) is not None]
        ordered = accumulate((value for _, value in known), max)
        return replace(self, **{name: value for (name, _), value in zip(known, ordered, strict=True)})


@dataclass(frozen=True, slots=True)
class Work:
    """The sums at a call's turning points."""

    registered: StageSeconds
    first: FirstToken | None
    end: StageSeconds
    admit_s: float  # stage 3


def stage_spans(moments: Moments, work: Work, *, finished: bool) -> tuple[StageSpan, ...]:
    """The stages that the call reached, in their order. Together they leave no gap between `received` and `end`.

    `finished`: every choice has ended by itself; otherwise it was aborted or failed in the last stage that it reached.
    """
    return tuple(_before_engine(at := moments.in_order(), work)) + tuple(_in_engine(at, work, finished))


def _before_engine(at: Moments, work: Work) -> Iterator[StageSpan]:
    yield _span("frontend", at.received, at.arrival, at.arrival - at.received)
    yield _span("renderer", at.arrival, at.rendered, at.rendered - at.arrival)
    yield _span("admission", at.rendered, at.registered, work.admit_s)


def _in_engine(at: Moments, work: Work, finished: bool) -> Iterator[StageSpan]:
    first, start, end = work.first, work.registered, work.end
    until_first = end if first is None else first.after
    last = at.last_token if finished and at.last_token is not None else at.end
    yield _span("scheduler", at.registered, _or(at.scheduled, at.end), until_first.scheduler - start.scheduler)
    if at.scheduled is not None:
        yield _span("prefill", at.scheduled, _or(at.first_token, at.end), until_first.prefill - start.prefill)
    if at.scheduled is not None and at.first_token is not None and first is not None:
        before = first.before
        drawn = max(at.scheduled, at.first_token - max(first.sample_s, 0.0))
        yield _span("decode", at.first_token, last, end.decode - first.after.decode)
        yield _span("sampler", drawn, last, end.sampler - before.sampler)
        yield _span("detokenizer", at.first_token, at.end, end.detokenizer - before.detokenizer)
    yield _span("completion", last, at.end, at.end - last)


def _or(moment: float | None, end: float) -> float:
    return end if moment is None else moment


def _span(stage: str, start: float, end: float, busy_s: float) -> StageSpan:
    return StageSpan(stage, start, end, min(max(busy_s, 0.0), end - start))
