"""Steps of which nothing is wanted but the largest logit of each row: without logits, and to the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.batch import ModelBatch, SamplingMetadata
from core.isolation.faults import StageError
from core.model.interface import Executor, ExecutorContext
from core.model.local_executor import LocalExecutor
from core.model.optional_model import Argmax, argmax_of
from core.model.spec import ModelSpec
from core.stages.sampler import SamplerContext
from core.testing.batches import Share, batch_of
from core.testing.executor import ExecutorContract
from core.testing.harness.pipelines import call, running
from core.testing.sampler_reference import spec_of
from core.testing.sampler_rows import EOS, VOCAB, make_row, metadata_of
from core.testing.suites import words_of
from core.testing.toy_model import BLOCK_SIZE, ArgmaxSampler, Toy, ToyModel, toy_next
from plugins.samplers.greedy import Greedy
from plugins.samplers.standard import Standard

TINY = Path(__file__).resolve().parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"


@dataclass(slots=True)
class QuickModel(ToyModel):
    """`spoilt`: what it returns in place of the truth."""

    spoilt: Any = None
    num_quick: int = 0

    def forward_argmax(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Argmax:
        self.num_quick += 1
        found = argmax_of(self.forward(batch, kv_caches))
        return found if self.spoilt is None else self.spoilt(found)


@dataclass(slots=True)
class QuickSampler(ArgmaxSampler):
    asked: list[int] = field(default_factory=list)

    def takes_argmax(self, metadata: SamplingMetadata) -> bool:
        self.asked.append(len(metadata.rows))
        return True


class TestLocalWithoutLogits(ExecutorContract):
    """The contract holds where model and sampler agree, and no sampler is called."""

    component = LocalExecutor
    provides = words_of("executor", "local")

    def make(self, context: Any) -> Executor:
        assert isinstance(context, ExecutorContext)
        return super().make(quick_context(context))


def quick_context(context: ExecutorContext) -> ExecutorContext:
    def model(inner: Any) -> QuickModel:
        slow = context.build_model(inner)
        assert isinstance(slow, ToyModel)
        return QuickModel(lambda batch: slow.fault(batch) if slow.fault is not None else None, slow.batches)

    def sampler(device: str) -> QuickSampler:
        slow = context.build_sampler(device)
        assert isinstance(slow, ArgmaxSampler)
        return QuickSampler(slow.forgotten, slow.shapes)

    return replace(context, build_model=model, build_sampler=sampler)


def executor_of(model: QuickModel, sampler: ArgmaxSampler) -> LocalExecutor:
    toy = Toy(model, sampler)
    executor = LocalExecutor(LocalExecutor.Settings(), toy.context())
    executor.allocate(8)
    return executor


def batch() -> ModelBatch:
    return batch_of([Share("a", [3, 4, 5], 0, 3, [1])], BLOCK_SIZE)


def test_no_sampler_is_called() -> None:
    model, sampler = QuickModel(), QuickSampler()
    result = executor_of(model, sampler).submit(batch()).result()
    assert dict(result.sampled.token_ids) == {"a": (toy_next([3, 4, 5]),)}
    assert model.num_quick == 1 and sampler.asked == [1] and not sampler.shapes


def test_a_sampler_that_does_not_know_of_it_gets_logits() -> None:
    model, sampler = QuickModel(), ArgmaxSampler()
    executor_of(model, sampler).submit(batch()).result()
    assert not model.num_quick and sampler.shapes


@pytest.mark.parametrize("peak", [float("nan"), float("inf"), float("-inf")])
def test_without_a_number_the_sampler_says_what_is_wrong(peak: float) -> None:
    model, sampler = (
        QuickModel(spoilt=lambda found: Argmax(found.ids, torch.full_like(found.peaks, peak))),
        QuickSampler(),
    )
    result = executor_of(model, sampler).submit(batch()).result()
    assert len(sampler.shapes) == 1 and result.sampled.token_ids["a"] == (toy_next([3, 4, 5]),)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda found: (found.ids, found.peaks),
        lambda found: Argmax(found.ids + 10**6, found.peaks),
        lambda found: Argmax(found.ids - 10**6, found.peaks),
        lambda found: Argmax(found.ids.int(), found.peaks),
        lambda found: Argmax(found.ids[:0], found.peaks),
        lambda found: Argmax(found.ids, found.peaks.double()),
    ],
)
def test_what_is_no_answer_names_the_model(spoilt: Any) -> None:
    submission = executor_of(QuickModel(spoilt=spoilt), QuickSampler()).submit(batch())
    with pytest.raises(StageError, match="forward_argmax returned"):
        submission.result()


@pytest.mark.parametrize("component", [Standard, Greedy])
def test_built_in_samplers_take_it_where_they_can(component: Any) -> None:
    def sampler(model: ModelSpec) -> Any:
        return component(component.Settings(), SamplerContext(model))

    rows = metadata_of([make_row("a"), make_row("b")])
    assert sampler(spec_of(VOCAB, EOS, frozenset())).takes_argmax(rows)
    assert not sampler(spec_of(VOCAB, EOS, frozenset({4}))).takes_argmax(rows)


async def test_answers_are_the_same_with_and_without_logits() -> None:
    """Log-probabilities need logits: the whole way is taken."""
    overrides = (
        f"model.source={TINY}",
        "model=cpu",
        "attention=cpu_paged",
        "quant=cpu_gguf",
        "model.weight_cache=false",
    )
    asked = [[7 + index, 9, 11, 200 - index] * 5 for index in range(6)]
    async with running(*overrides, "cache.num_blocks=64") as pipeline:
        quick = await pipeline.answer_all([call(f"q{i}", ids, 20, temperature=0.0) for i, ids in enumerate(asked)])
        slow = await pipeline.answer_all(
            [call(f"s{i}", ids, 20, temperature=0.0, logprobs=0) for i, ids in enumerate(asked)]
        )
    assert [c.token_ids for a in quick for c in a.choices] == [c.token_ids for a in slow for c in a.choices]
