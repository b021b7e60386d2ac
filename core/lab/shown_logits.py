"""A whole pipeline in this process that shows the logits of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from core.batch import SamplerOutput, SamplingMetadata
from core.testing.harness.pipelines import RunningPipeline, running

PATIENT = "admission=open"
"""Whatever else the machine does, no request has waited too long."""
Take = Callable[[str, Tensor], None]
"""(name of a call, logits [n, V] of its next n positions). The tensor is the step's own for as long as the call lasts."""


@asynccontextmanager
async def shown_logits(overrides: Sequence[str], take: Take) -> AsyncIterator[RunningPipeline]:
    """`take` is told before the sampler edits anything: of a call with `prompt_logprobs` every position, else those that sample.

    Calls need `logprobs`, since a step in which nobody asks for any may have no logits. A preempted prompt would come twice: give
    it blocks enough.
    """
    async with running(*overrides, PATIENT) as pipeline:
        executor: Any = pipeline.engine._pipeline.executor
        sample = executor._sampler.sample

        def watched(logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
            for request_id, rows in rows_of(metadata).items():
                take(request_id.rpartition("~")[0], logits[rows])
            sampled: SamplerOutput = sample(logits, metadata)
            return sampled

        executor._sampler.sample = watched
        yield pipeline


def rows_of(metadata: SamplingMetadata) -> Mapping[str, list[int]]:
    """By request, in order of positions: what is sampled comes after the prompt."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for part in metadata.prompt_rows:
        found[part.request_id] += part.rows
    for index, row in zip(metadata.sampled_rows, metadata.rows, strict=True):
        found[row.request_id].append(index)
    return found


def runs_native_code(pipeline: RunningPipeline) -> bool:
    """Whether compiled code runs the model, and not the torch layers in its place."""
    executor: Any = pipeline.engine._pipeline.executor
    return bool(getattr(executor._runner.model, "is_native", False))
