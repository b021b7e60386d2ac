"""What stands around a predictor: whatever it does wrong, schedulers get a number that can be, and no request fails."""

from __future__ import annotations

import math

from core.errors import shown
from core.isolation.faults import Faults, StageError
from core.isolation.stages import CHANGED, Before
from core.request import Request
from core.stages.predictor import Predictor, num_tokens_left


class GuardedPredictor:
    """A `Predictor` that never raises, and answers a float from 0 to what `max_tokens` and the context leave.

    What a predictor says is only a guess: where it fails, the bound itself is the answer, and the failure is noted. It is made
    once and outlives the books, so what it has learnt is kept; the throwaway pipelines of a recovery (`core.isolation.recovery`)
    ask it and teach it nothing.
    """

    def __init__(self, predictor: Predictor, faults: Faults, max_model_len: int):
        self._predictor = predictor
        self._faults = faults
        self._max_model_len = max_model_len

    def remaining(self, request: Request) -> float:
        most = num_tokens_left(request, self._max_model_len)
        before, cause = Before((request,)), None
        try:
            found = self._faults.call("predictor", request.request_id, self._predictor.remaining, request)
            reason = _flaw(found)
        except StageError as error:
            found, reason, cause = most, error.reason, error
        if before.restore():
            reason = reason or CHANGED
        if reason:
            self._faults.note("predictor", reason, cause)
            return float(most)
        return float(min(found, most))

    def observe(self, request: Request) -> None:
        if self._faults.quiet:
            return
        before, reason, cause = Before((request,)), "", None
        try:
            self._faults.call("predictor", request.request_id, self._predictor.observe, request)
        except StageError as error:
            reason, cause = error.reason, error
        if before.restore():
            reason = reason or CHANGED
        if reason:
            self._faults.note("predictor", reason, cause)


def _flaw(found: object) -> str:
    if type(found) is not float and type(found) is not int:  # numpy's numbers and booleans included
        return f"remaining returned {shown(found)}, which is no float"
    return "" if 0 <= found < math.inf else f"remaining returned {shown(found)}; it must be finite, and 0 or more"
