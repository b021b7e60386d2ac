"""Logits processors that each break one promise of `core.stages.logits_processor`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Softer:
    """Concerns every request."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        pass

    def state(self, row, params):
        return {"calls": 0}

    def apply(self, logits, rows, states):
        logits *= 0.5


class DependsOnBatch(Softer):
    """Rows are compared with those of other requests."""

    caught_by = "test_a_row_does_not_depend_on_its_batch"

    def apply(self, logits, rows, states):
        logits -= logits.mean(dim=0)


class CountsCalls(Softer):
    """Bans more with each call, though a position may come twice."""

    caught_by = "test_a_position_may_come_twice"

    def apply(self, logits, rows, states):
        for index, state in enumerate(states):
            state["calls"] += 1
            logits[index, : state["calls"]] = -50.0


class EditsAll(Softer):
    """Writes past its rows, into those of others that lie beside them in memory."""

    caught_by = "test_it_edits_in_place_and_its_rows_only"

    def apply(self, logits, rows, states):
        logits -= 1.0
        if logits.storage_offset():
            logits.as_strided((1, logits.shape[1]), logits.stride(), 0)[:] = 0.0


class LeavesNaN(Softer):
    """Takes the logarithm of what may be negative."""

    caught_by = "test_finite_logits_stay_drawable"

    def apply(self, logits, rows, states):
        logits.log_()
