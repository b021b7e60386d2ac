"""After books have failed: who is at fault, who goes on, and when it is time to give up.

A fault that names its request is that request's. Otherwise each request is tried alone, in a throwaway pipeline without a
model, up to the state in which the books failed. When none fails alone, all of them go on; when that happens again and again
without a token between, the newest half is given up each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from core.batch import SchedulerOutput, Verdict
from core.isolation.faults import Faults, SpoiltKVError, StageError
from core.isolation.scheduler import Live
from core.pipeline import EnginePipeline
from core.request import FinishReason

MAX_IN_A_ROW = 3
MAX_LOST = 3
MAX_EMPTY_PLANS = 3


class Recovery:
    """Counts recoveries over the life of an engine."""

    def __init__(self, faults: Faults):
        self._faults = faults
        self.in_a_row = 0  # recoveries since the last step that brought a token
        self._num_lost = 0  # of these, in a row, those in which every one of several requests was lost

    def progressed(self) -> None:
        """A step has brought tokens."""
        self.in_a_row = self._num_lost = 0

    def guilty(
        self, error: StageError, pipeline: EnginePipeline, live: Mapping[str, Live], verdicts: Mapping[str, Verdict]
    ) -> dict[str, str]:
        """Requests that do not go on, with the text for their clients. Raises RuntimeError when nothing goes on any more."""
        self.in_a_row += 1
        guilty = {key: text for key, text in self._faults.requests.items() if key in live}
        if error.request_id in live and error.request_id is not None:
            guilty[error.request_id] = self._faults.fail(error.group, error.reason, error.request_id, error)
        elif not guilty:
            guilty = self._tried(error, pipeline, live, verdicts)
        lost = len(guilty) == len(live) > 1
        self._num_lost = self._num_lost + 1 if lost else 0
        if self._num_lost >= MAX_LOST:
            raise RuntimeError(f"{self._num_lost} times in a row every request failed: {error}") from error
        return guilty

    def _tried(
        self, error: StageError, pipeline: EnginePipeline, live: Mapping[str, Live], verdicts: Mapping[str, Verdict]
    ) -> dict[str, str]:
        guilty: dict[str, str] = {}
        if not isinstance(error, SpoiltKVError):
            trials = Trials(pipeline, self._faults)
            for key, request in live.items():
                found = trials.fault(key, request, verdicts.get(key))
                if found is not None:
                    guilty[key] = self._faults.fail(found.group, found.reason, key, found)
        if not guilty:
            self._faults.note(error.group, error.reason, error)
        if not guilty and self.in_a_row > MAX_IN_A_ROW:
            newest = list(live)[len(live) // 2 :]
            text = f"{self._faults.names.of(error.group).who}: {error.reason} ({self.in_a_row} times in a row)"
            guilty = dict.fromkeys(newest, text)
        return guilty


class Trials:
    """Runs requests alone through stages 4 to 6, each up to the state in which it is now, without a model."""

    def __init__(self, pipeline: EnginePipeline, faults: Faults):
        self._pipeline = pipeline
        self._names = faults.names
        self._clean: EnginePipeline | None = None  # no request has failed in it

    def fault(self, key: str, live: Live, verdict: Verdict | None) -> StageError | None:
        """What fails for this request alone. `verdict`: of the step that failed, where it failed in taking it in."""
        if self._clean is not None and self._fault_in(self._clean, key, live, verdict) is None:
            return None
        self._clean = self._pipeline.rebuild(Faults(self._names, math.inf, quiet=True))
        found = self._fault_in(self._clean, key, live, verdict)
        if found is not None:
            self._clean = None
        return found

    def _fault_in(self, trial: EnginePipeline, key: str, live: Live, verdict: Verdict | None) -> StageError | None:
        try:
            _replay(trial, live, verdict)
            trial.scheduler.finish([key], FinishReason.ABORT)
        except StageError as error:
            return error
        return None


def _replay(trial: EnginePipeline, live: Live, verdict: Verdict | None) -> None:
    """All but the last output id as a prompt, then the last one as if it had just been sampled, then one more plan.

    Raises StageError for whatever goes wrong on the way.
    """
    steps = [] if verdict is None else [verdict]
    num_output = len(live.output_token_ids) - sum(len(step.token_ids) for step in steps)
    if num_output:
        steps.insert(0, Verdict((live.output_token_ids[num_output - 1],)))
    request = live.original.afresh(live.output_token_ids[: max(num_output - 1, 0)])
    trial.scheduler.add(request)
    for _ in range(live.num_tokens + MAX_EMPTY_PLANS):
        plan = _planned(trial, request.request_id)
        if request.is_finished:
            return  # refused, or ended by its verdict
        if not plan.scheduled[0].samples:
            trial.scheduler.update(plan, {})
        elif not steps:
            return
        else:
            trial.scheduler.update(plan, {request.request_id: steps.pop(0)})
            if not trial.scheduler.live:
                return


def _planned(trial: EnginePipeline, key: str) -> SchedulerOutput:
    num_zeros = trial.prefill.num_zeros
    for _ in range(MAX_EMPTY_PLANS):
        plan = trial.scheduler.schedule()
        if key in trial.faults.requests:  # of a prefill or decode, which do not raise
            incident = trial.faults.take_incidents()[-1]
            raise StageError(incident.group, incident.reason, key)
        if plan.scheduled or plan.refused:
            return plan
    group = "prefill" if trial.prefill.num_zeros > num_zeros else "scheduler"
    raise StageError(group, "it leaves the request waiting for ever, also when nothing else is in flight", key)
