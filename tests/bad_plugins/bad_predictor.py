"""Predictors that each break one promise of `core.stages.predictor`."""

from __future__ import annotations

import time

from core.stages.predictor import MaxTokens


class Endless(MaxTokens):
    """Does not mind what max_tokens leaves."""

    caught_by = "test_what_is_left_is_a_finite_float_within_the_bounds"

    def remaining(self, request):
        return 1000.0


class BelowZero(MaxTokens):
    """The mean less what there is: below 0 for one that is longer than others were."""

    caught_by = "test_also_of_one_that_goes_on_for_ever"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._mean = None

    def remaining(self, request):
        return super().remaining(request) if self._mean is None else self._mean - request.num_output_tokens

    def observe(self, request):
        self._mean = float(request.num_output_tokens)


class Marks(MaxTokens):
    """Remembers in the request that it was asked about it."""

    caught_by = "test_requests_are_left_as_they_are"

    def remaining(self, request):
        request.priority += 1
        return super().remaining(request)


class Tires(MaxTokens):
    """Answers less each time."""

    caught_by = "test_to_ask_changes_no_answer"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._factor = 1.0

    def remaining(self, request):
        self._factor *= 0.999
        return super().remaining(request) * self._factor


class OneOfAKind(MaxTokens):
    """Another answer in each instance."""

    caught_by = "test_the_same_past_gives_the_same_answers"
    instances = 0

    def __init__(self, settings, context):
        super().__init__(settings, context)
        OneOfAKind.instances += 1
        self._share = 1 / (1 + OneOfAKind.instances)

    def remaining(self, request):
        return super().remaining(request) * self._share


class Collects(MaxTokens):
    """Keeps what it said of each request, also of those that were aborted."""

    caught_by = "test_memory_does_not_grow_with_requests"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._said = {}

    def remaining(self, request):
        return self._said.setdefault(request.request_id, super().remaining(request))


class LooksAtTheClock(MaxTokens):
    """Expects less at night."""

    caught_by = "test_it_has_no_clock"

    def remaining(self, request):
        return super().remaining(request) * (0.5 if time.localtime(time.time()).tm_hour < 6 else 1.0)
