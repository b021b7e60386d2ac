"""A model that says what a test tells it to: for faults that show only with certain tokens in a certain order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.batch import ModelBatch, SampledRow, SamplerOutput
from core.testing.harness.fake_executors import Done, FakeExecutor


def nothing(row: SampledRow) -> int:
    raise AssertionError(f"no script for {row.request_id}")


@dataclass
class ScriptedExecutor(FakeExecutor):
    """Samples `script(row)`, by seed, choice and position for instance. The fake model below still checks its reads."""

    script: Callable[[SampledRow], int] = nothing

    def submit(self, batch: ModelBatch) -> Done:
        super().submit(batch)
        return Done(SamplerOutput(token_ids={row.request_id: (self.script(row),) for row in batch.sampling.rows}))
