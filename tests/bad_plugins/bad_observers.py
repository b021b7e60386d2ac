"""Observers that each break one promise of `core.observers`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from core.outputs import RequestRecord


class Quiet:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        pass

    def step_finished(self, stats):
        pass

    def request_finished(self, record):
        pass

    def close(self):
        pass


class ChangesRecords(Quiet):
    """Hides the tenant from the observers after it."""

    caught_by = "test_it_does_not_change_records"

    def request_finished(self, record):
        object.__setattr__(record, "tenant", "hidden")


class RaisesWithoutTokens(Quiet):
    """Divides by the tokens of a request that got none."""

    caught_by = "test_it_takes_every_kind_of_record"

    def request_finished(self, record: RequestRecord):
        self.mean = (record.timings.e2e or 0.0) / record.usage.completion_tokens


class KeepsSteps(Quiet):
    """Remembers every step that a server ever makes."""

    caught_by = "test_steps_are_not_kept"

    def __init__(self, settings, context):
        self.steps = []

    def step_finished(self, stats):
        self.steps.append((stats, str(stats.step)))
