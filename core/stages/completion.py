"""Stage 9, completion: finish reasons, repetition detection (R9.1). Timings are made here too, on the front side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.outputs import Timings
from core.request import FinishReason, RepetitionDetection, Request, RequestStatus

if TYPE_CHECKING:
    from core.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CompletionContext:
    model: ModelSpec  # eos_token_ids, max_model_len


FINISHED = RequestStatus.FINISHED


class Completion(Protocol):
    """Config group `completion`. Token side, in the engine process, once per step; stop strings are stage 8's.

    Example::

        from collections.abc import Mapping

        from core.batch import SamplerOutput, SchedulerOutput, Verdict
        from core.request import FinishReason
        from core.stages.completion import CompletionContext, Standard
        from pydantic import Field


        class Bounded(Standard):
            class Settings(Standard.Settings):
                max_output_tokens: int = Field(default=8192, ge=1, description="whatever a client asks for")

            def __init__(self, settings: Settings, context: CompletionContext):
                super().__init__(settings, context)
                self._limit = settings.max_output_tokens

            def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
                verdicts = dict(super().judge(output, sampled))
                for part in output.scheduled:
                    verdict = verdicts.get(part.request.request_id, Verdict(()))
                    kept = verdict.token_ids[: self._limit - part.request.num_output_tokens]
                    full = part.request.num_output_tokens + len(kept) == self._limit
                    if kept != verdict.token_ids or (full and verdict.finish_reason is None):
                        verdicts[part.request.request_id] = Verdict(kept, FinishReason.LENGTH)
                return verdicts
    """

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
        """Which ids each request keeps (cut after an end) and whether it has ended, and why.

        Request output_token_ids do not hold the new ids yet. Order: EOS and stop_token_ids (not before min_tokens),
        then length (max_tokens, max_model_len), then repetition. A request in `sampled.errors` gets FinishReason.ERROR.
        EOS of a request with a grammar ends it in any case: nothing can follow. Neither argument is to be changed. When this
        raises, requests are judged one by one, each in a plan of its own.
        """
        ...


class Standard:
    """Ends by EOS, stop_token_ids, length and repetition. Keeps no state: a verdict follows from the request alone.

    The id that ends a sequence is kept in `token_ids`. EOS has stop_reason None; a stop token id has itself.
    Repetition, like EOS, does not end a request before `min_tokens`.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        max_repetition_window: int = Field(default=4096, ge=2)  # newest output tokens that repetition detection reads

    def __init__(self, settings: Settings, context: CompletionContext):
        self._window = settings.max_repetition_window
        self._eos = context.model.eos_token_ids
        self._max_model_len = context.model.max_model_len

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
        verdicts: dict[str, Verdict] = {}
        ids_of, errors = sampled.token_ids.get, sampled.errors
        for part in output.scheduled:
            request = part.request
            if request.status > FINISHED:  # aborted while the step was in flight
                continue
            token_ids = ids_of(request.request_id)
            if errors and request.request_id in errors:
                verdicts[request.request_id] = Verdict((), FinishReason.ERROR)
            elif token_ids is not None:
                verdicts[request.request_id] = self._judge_one(request, token_ids)
        return verdicts

    def _judge_one(self, request: Request, token_ids: tuple[int, ...]) -> Verdict:
        """The first end cuts what follows it: speculation may bring several ids at once."""
        params, num_output = request.params, len(request.output_token_ids)
        most = min(params.max_tokens, self._max_model_len - len(request.prompt_token_ids))
        may_end_early = params.stop_token_ids or params.repetition_detection or not self._eos.isdisjoint(token_ids)
        if not may_end_early and num_output + len(token_ids) < most:
            return Verdict(token_ids)  # nearly always
        for index, token_id in enumerate(token_ids):
            may_end = num_output + index >= params.min_tokens
            ends = params.grammar is not None or (may_end and not params.ignore_eos)  # nothing can follow in a grammar
            if ends and token_id in self._eos:
                return Verdict(token_ids[: index + 1], FinishReason.STOP)
            if may_end and token_id in params.stop_token_ids:
                return Verdict(token_ids[: index + 1], FinishReason.STOP, token_id)
            if num_output + index + 1 >= most:
                return Verdict(token_ids[: index + 1], FinishReason.LENGTH)
            if may_end and params.repetition_detection and self._repeats(request, token_ids[: index + 1]):
                return Verdict(token_ids[: index + 1], FinishReason.REPETITION)
        return Verdict(token_ids)

    def _repeats(self, request: Request, new: tuple[int, ...]) -> bool:
        rule = request.params.repetition_detection
        if rule is None:
            return False
        window = min(rule.max_pattern_size * max(rule.min_count, 2), self._window)
        return ends_in_repetition((*request.output_token_ids[-window:], *new)[-window:], rule)


def ends_in_repetition(token_ids: Sequence[int], rule: RepetitionDetection) -> bool:
    """Whether a pattern of min_pattern_size to max_pattern_size tokens stands `min_count` (at least 2) times at the end.

    Linear in len(token_ids): read backwards, the sequence has period p for p * min_count tokens exactly where its match
    with itself shifted by p is at least p * (min_count - 1) long (Z-function; Gusfield, "Algorithms on Strings").
    """
    count = max(rule.min_count, 2)
    longest = min(rule.max_pattern_size, len(token_ids) // count)
    if longest < max(rule.min_pattern_size, 1):
        return False
    matches = _self_matches(token_ids[::-1], longest)
    return any(matches[size] >= size * (count - 1) for size in range(max(rule.min_pattern_size, 1), longest + 1))


def _self_matches(text: Sequence[int], last: int) -> list[int]:
    """Z-function for shifts up to `last`: length of the longest common prefix of `text` and `text[shift:]`."""
    size = len(text)
    z = [size] + [0] * last
    left = right = 0  # [left, right): the rightmost stretch known to equal a prefix
    for shift in range(1, last + 1):
        match = min(right - shift, z[shift - left]) if shift < right else 0
        while shift + match < size and text[match] == text[shift + match]:
            match += 1
        z[shift] = match
        if shift + match > right:
            left, right = shift, shift + match
    return z


def timings_of(
    arrival: float, scheduled: float | None, first_token: float | None, last_token: float | None, num_tokens: int
) -> Timings:
    """Monotonic seconds -> durations. None where the moment never came; never negative, also if the clock stepped back."""
    tpot = None
    if first_token is not None and last_token is not None and num_tokens > 1:
        tpot = max(last_token - first_token, 0.0) / (num_tokens - 1)
    queue, ttft, e2e = (None if at is None else max(at - arrival, 0.0) for at in (scheduled, first_token, last_token))
    return Timings(queue=queue, ttft=ttft, tpot=tpot, e2e=e2e)
