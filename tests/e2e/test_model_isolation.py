"""A model or attention plugin that spoils one request's KV, or the batch itself: nobody else notices, then or later."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.batch import ModelBatch
from core.components import PluginRecord, import_target
from core.errors import GenerationError
from core.hookspecs import Component
from core.pipeline import PipelineDescription
from core.session import open_session
from core.stages.frontend import GenerateRequest
from core.testing.harness.faulty_pipelines import importable
from core.testing.harness.pipelines import RunningPipeline, call, running_session
from core.testing.tiny_models import make_tiny_model

VICTIM = "victim"
WHO = "(plugin chaos, acme-chaos 1.0)"


@dataclass
class PoisonsKV:
    """Attention that writes NaN as the victim's KV, from its first chunk on."""

    inner: Any
    rows: slice | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare(self, batch: ModelBatch, specs: Any) -> Any:
        self.rows = None
        for index, key in enumerate(batch.request_ids):
            if VICTIM in key:
                self.rows = slice(*batch.query_start_loc.tolist()[index : index + 2])
        return self.inner.prepare(batch, specs)

    def forward(self, spec: Any, q: Any, k: Any, v: Any, kv_cache: torch.Tensor, metadata: Any) -> torch.Tensor:
        if self.rows is not None:
            k, v = k.clone(), v.clone()
            k[self.rows] = v[self.rows] = math.nan
        out: torch.Tensor = self.inner.forward(spec, q, k, v, kv_cache, metadata)
        return out


@dataclass
class WritesIntoTheBatch:
    """A model that sends all KV of the step to slot 0 when the victim is in it."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        if any(VICTIM in row.request_id and row.position > 2 for row in batch.sampling.rows):
            batch.slot_mapping.zero_()
        logits: torch.Tensor = self.inner.forward(batch, kv_caches)
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@asynccontextmanager
async def running(
    folder: Path, group: str = "", wrap: Callable[[Any], Any] | None = None, *overrides: str
) -> AsyncIterator[RunningPipeline]:
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1", "process.separate=false")
    session = open_session([*fixed, *overrides])
    with ExitStack() as stack:
        if wrap is not None:
            session = replace(session, description=stack.enter_context(chaos(session.description, group, wrap)))
        async with running_session(session) as pipeline:
            yield pipeline


@contextmanager
def chaos(description: PipelineDescription, group: str, wrap: Callable[[Any], Any]) -> Iterator[PipelineDescription]:
    """The same with `group`'s component wrapped, as if the plugin `chaos` provided it."""
    part = description.part(group)
    cls = import_target(part.provided, part.provided.component.target)
    with importable(lambda settings, context: wrap(cls(settings, context)), sys.modules[__name__]) as target:
        component = Component("chaos", target, "fails")
        record = PluginRecord("chaos", "acme-chaos", "1.0", "loaded")
        provided = replace(part.provided, component=component, plugin=record)
        parts = tuple(replace(p, provided=provided) if p is part else p for p in description.parts)
        yield PipelineDescription(parts)


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(6, 330), k=count)


def calls() -> list[GenerateRequest]:
    """32 calls, the victim among them; every third begins as it does."""
    prompt = ids(40, 0)
    others = [call(f"r{i}", [*prompt[:32], *ids(4 + i, i)] if i % 3 else ids(10 + i, i), 12) for i in range(1, 32)]
    return [*others[:16], call(VICTIM, prompt, 12), *others[16:]]


async def tokens(pipeline: RunningPipeline, wanted: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    return {c.request_id: a.token_ids for c, a in zip(wanted, await pipeline.answer_each(wanted), strict=True)}


async def answer_all(pipeline: RunningPipeline, wanted: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    """Of all but the victim, which fails with an error that names the plugin."""
    found = await asyncio.gather(*(pipeline.answer(c) for c in wanted), return_exceptions=True)
    answers = {c.request_id: answer for c, answer in zip(wanted, found, strict=True)}
    error = answers.pop(VICTIM)
    assert isinstance(error, GenerationError) and WHO in str(error), error
    return {key: answer.token_ids for key, answer in answers.items()}  # type: ignore[union-attr]


async def test_nan_in_one_requests_kv_reaches_no_other_by_prefix_or_by_block(folder: Path) -> None:
    wanted = calls()
    async with running(folder) as pipeline:
        solo = await tokens(pipeline, wanted)
    everyone_else = {key: value for key, value in solo.items() if key != VICTIM}
    # the victim is first and its prompt takes three chunks, so others find its first block while it is still running
    at_once = sorted(wanted, key=lambda c: c.request_id != VICTIM)
    small = ("cache.num_blocks=24", "prefill.chunk_size=16", "scheduler.max_num_scheduled_tokens=80")
    async with running(folder, "attention", PoisonsKV, *small, "scheduler.max_num_running_reqs=32") as pipeline:
        with pytest.raises(GenerationError, match="logits hold NaN"):
            await pipeline.answer(call(VICTIM, ids(40, 0), 12))
        assert await tokens(pipeline, [call("again", ids(40, 0), 12)]) == {"again": solo[VICTIM]}
        for _ in range(20):  # whether others come while the victim is in its first chunks is up to the machine
            assert await pipeline.front.reset_prefix_cache()
            assert await answer_all(pipeline, at_once) == everyone_else
            if pipeline.engine._faults.cautious:
                break
        assert pipeline.engine._faults.cautious
        assert await tokens(pipeline, [c for c in wanted if c.request_id != VICTIM]) == everyone_else


async def test_a_model_that_writes_into_the_batch_fails_one_request_and_all_others_are_computed_again(
    folder: Path,
) -> None:
    wanted = calls()
    async with running(folder) as pipeline:
        solo = await tokens(pipeline, wanted)
    async with running(folder, "model", WritesIntoTheBatch, "cache.num_blocks=256") as pipeline:
        got = await answer_all(pipeline, wanted)
        assert got == {key: value for key, value in solo.items() if key != VICTIM}
        (incident,) = pipeline.front.incidents()
        assert (incident.group, incident.name) == ("model", "chaos")
        assert "changed the tensors of the batch" in incident.reason
