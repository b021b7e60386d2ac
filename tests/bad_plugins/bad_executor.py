"""Executors that each break one promise of `core.model.interface.Executor`."""

from __future__ import annotations

from core.model.local_executor import LocalExecutor


class LatestResult:
    """Whoever asks gets the result of the step that was submitted last."""

    def __init__(self, owner):
        self._owner = owner

    def result(self):
        return self._owner.last.result()


class ResultOrder(LocalExecutor):
    """Results come in another order than the steps."""

    caught_by = "test_every_submission_has_the_result_of_its_own_batch"

    def submit(self, batch):
        self.last = super().submit(batch)
        return LatestResult(self)


class RaisesAtOnce(LocalExecutor):
    """A failed step raises where it is submitted, and with it those that were in flight are lost."""

    caught_by = "test_a_failed_step_raises_from_its_result_and_can_be_run_again"

    def submit(self, batch):
        step = super().submit(batch)
        step.result()
        return step


class RemembersAll(LocalExecutor):
    """Never tells the sampler that a request has ended."""

    caught_by = "test_tokens_are_those_of_a_solo_run"

    def forget(self, request_ids):
        pass
