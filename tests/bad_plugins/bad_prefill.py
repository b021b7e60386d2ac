"""Prefills that each break one promise of `core.stages.prefill`."""

from __future__ import annotations

from core.stages.prefill import Chunked


class OverBudget(Chunked):
    """A chunk is a chunk, whatever is left of the step."""

    caught_by = "test_no_more_than_remains_and_the_budget_allows"

    def num_tokens(self, request, remaining, token_budget):
        return min(remaining, 512)


class NeverBegins(Chunked):
    """A prompt longer than the step's budget waits for one that will never come."""

    caught_by = "test_every_prompt_moves_on_when_it_has_a_step_to_itself"

    def num_tokens(self, request, remaining, token_budget):
        return remaining if remaining <= token_budget else 0


class MarksRequests(Chunked):
    """Writes to the request what is the scheduler's to write."""

    caught_by = "test_the_request_is_left_as_it_is"

    def num_tokens(self, request, remaining, token_budget):
        request.priority -= 1
        return super().num_tokens(request, remaining, token_budget)
