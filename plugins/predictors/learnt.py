"""`predictor: learnt`: how long outputs get, learnt from requests that have ended.

A regression of log output length on features of the prompt (length, tenant, max_tokens, its first and last tokens), and the
spread of outputs around it, which says what is left of one that goes on. Microseconds per request, and memory that does not grow.
That a predicted order does nearly as well as the true one: Zheng et al. 2023, Fu et al. 2024; that the prediction is to be
renewed while tokens come: Shahout et al. 2024 (TRAIL).
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from core.request import FinishReason, Request
from core.stages.predictor import PredictorContext, num_tokens_left
from plugins.predictors.features import features_of
from plugins.predictors.regression import Regression
from plugins.predictors.spread import PRIOR_DEVIATION, Spread


class Learnt:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        prior: float = Field(default=128.0, gt=0, description="tokens of output expected before any request has ended")
        table_size: int = Field(
            default=1024, ge=16, le=1 << 20, description="values of each feature that are remembered; 24 bytes each"
        )

    def __init__(self, settings: Settings, context: PredictorContext):
        self._max_model_len = context.max_model_len
        first = math.log1p(settings.prior) - PRIOR_DEVIATION**2 / 2  # the mean of a log-normal is above its median
        self._regression = Regression(settings.table_size, first)
        self._spread = Spread()

    def remaining(self, request: Request) -> float:
        most = num_tokens_left(request, self._max_model_len)
        if _runs_to_the_end(request):
            return float(most)
        num_tokens = request.num_output_tokens
        left = self._spread.left(self._regression.predict(features_of(request)), num_tokens)
        least = max(request.params.min_tokens - num_tokens, 1)  # it has not ended: one more comes
        return min(max(left, float(least)), float(most))

    def observe(self, request: Request) -> None:
        if _runs_to_the_end(request):
            return
        features = features_of(request)
        prediction = self._regression.predict(features)
        residual = math.log1p(request.num_output_tokens) - prediction
        is_cut = request.finish_reason is FinishReason.LENGTH
        self._spread.add(residual, is_cut)
        if residual > 0 or not is_cut:  # one that was cut says no more than that it would have been longer
            self._regression.update(features, residual)


def _runs_to_the_end(request: Request) -> bool:
    """Nothing but its length ends it."""
    params = request.params
    return params.ignore_eos and not (params.stop or params.stop_token_ids or params.repetition_detection)
